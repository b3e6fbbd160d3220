// Runs random collectives of cpulaunch's own transport among ranks that are threads of this process, and checks every
// result.  Without torch, so that it can be compiled with sanitizers and for other processors.
//
//     ranks LAYOUT ROUNDS SEED        LAYOUT: the number of ranks on each host, such as 3,1
//
// Exits with 1 where a result is wrong.

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "operations.hpp"

using namespace cpulaunch;

namespace {

constexpr auto kLimit = std::chrono::seconds(30);  // for one operation

struct Setup {
  explicit Setup(const std::string& text) {
    std::istringstream numbers(text);
    std::string number;
    for (int host = 0; std::getline(numbers, number, ','); ++host) {
      for (int i = 0; i < std::stoi(number); ++i) host_of.push_back(host);
    }
    offers.resize(host_of.size());
    listeners.resize(host_of.size());
    addresses.resize(host_of.size());
    pthread_barrier_init(&barrier, nullptr, static_cast<unsigned>(host_of.size()));
  }

  std::vector<int> host_of;
  std::vector<ShmOffer> offers;  // of each host's first rank
  std::vector<Network::Listener> listeners;
  std::vector<Network::Address> addresses;
  pthread_barrier_t barrier;
};

std::shared_ptr<Hierarchy> join(Setup& setup, int rank) {
  const Layout layout(setup.host_of, rank);
  const SharedSlots::Shape shape(layout.lanes, layout.hosts);
  auto& offer = setup.offers[layout.ranks_of[layout.host][0]];
  if (layout.local == 0 && layout.locals > 1) offer = {getpid(), SharedSlots::offer(layout.locals, shape)};
  if (layout.hosts > 1) {
    setup.listeners[rank] = Network::listen("127.0.0.1");
    setup.addresses[rank] = {"127.0.0.1", setup.listeners[rank].port};
  }
  pthread_barrier_wait(&setup.barrier);
  auto slots = SharedSlots::map(offer, layout.locals, shape);
  pthread_barrier_wait(&setup.barrier);
  if (layout.local == 0 && offer.descriptor >= 0) close(offer.descriptor);
  std::unique_ptr<Network> network;
  if (layout.hosts > 1) {
    network = std::make_unique<Network>(rank, setup.listeners[rank], setup.addresses, std::string(16, 'x'));
  }
  return std::make_shared<Hierarchy>(layout, std::move(slots), std::move(network));
}

using Numbers = std::vector<int32_t>;

// What `rank` has at `i` in operation `seed`: small, so that sums are exact.
int32_t value(uint64_t seed, int rank, size_t i) { return static_cast<int32_t>((seed * 31 + rank * 7 + i) % 101); }

Numbers values(uint64_t seed, int rank, size_t count) {
  Numbers numbers(count);
  for (size_t i = 0; i < count; ++i) numbers[i] = value(seed, rank, i);
  return numbers;
}

int32_t sum_of(uint64_t seed, int size, size_t i) {
  int32_t sum = 0;
  for (int rank = 0; rank < size; ++rank) sum += value(seed, rank, i);
  return sum;
}

char* bytes(Numbers& numbers) { return reinterpret_cast<char*>(numbers.data()); }

// An operation under way, and how its result is checked.
struct Running {
  std::vector<std::unique_ptr<Transfer>> transfers;
  std::function<void()> check;
  std::string name;

  bool test() const {
    bool all = true;
    for (const auto& each : transfers) all = each->test() && all;
    return all;
  }
};

class Rank {
 public:
  Rank(std::shared_ptr<Hierarchy> hierarchy, int rank, int size) : h_(std::move(hierarchy)), rank_(rank), size_(size) {}

  // All ranks draw the same numbers.
  Running start(std::mt19937_64& random) {
    const uint64_t seed = random() % 100000;
    static constexpr size_t kLongest[] = {1, 40, 3000, 70'000, 700'000};
    const size_t count = 1 + random() % kLongest[random() % 5];
    const int root = static_cast<int>(random() % size_);
    switch (random() % 6) {
      case 0:
      case 1: return all_reduce(seed, count);
      case 2: return all_gather(seed, count / size_ + 1, random() % 2);
      case 3: return reduce_scatter(seed, count / size_ + 1, random() % 2);
      case 4: return broadcast(seed, count, root);
      default: return all_to_all(seed, count / size_ + 1, random() % 3 == 0 ? root : -1);
    }
  }

 private:
  Running run(std::string name, std::vector<OperationPtr> operations, std::function<void()> check) {
    Running running;
    for (auto& each : operations) running.transfers.push_back(h_->start(std::move(each)));
    running.check = std::move(check);
    running.name = std::move(name);
    return running;
  }

  Running all_reduce(uint64_t seed, size_t count) {
    auto data = std::make_shared<Numbers>(values(seed, rank_, count));
    auto operation = make_all_reduce(*h_, bytes(*data), 4 * count, NumberType::int32, Reduction::sum);
    return run("all_reduce", {operation}, [=, this] {
      for (size_t i = 0; i < count; ++i) expect((*data)[i], sum_of(seed, size_, i), i);
    });
  }

  size_t length(size_t count, int rank, bool uneven) const { return uneven ? count * (rank % 3) / 2 : count; }

  Running all_gather(uint64_t seed, size_t count, bool uneven) {
    auto mine = std::make_shared<Numbers>(values(seed, rank_, length(count, rank_, uneven)));
    auto all = std::make_shared<std::vector<Numbers>>();
    std::vector<char*> outputs;
    std::vector<size_t> sizes;
    for (int rank = 0; rank < size_; ++rank) all->emplace_back(length(count, rank, uneven));
    for (auto& each : *all) outputs.push_back(bytes(each)), sizes.push_back(4 * each.size());
    return run("all_gather", {make_all_gather(*h_, bytes(*mine), outputs, sizes)}, [=, this] {
      for (int rank = 0; rank < size_; ++rank) {
        for (size_t i = 0; i < (*all)[rank].size(); ++i) expect((*all)[rank][i], value(seed, rank, i), i);
      }
      static_cast<void>(mine);
    });
  }

  Running reduce_scatter(uint64_t seed, size_t count, bool uneven) {
    auto inputs = std::make_shared<std::vector<Numbers>>();
    auto output = std::make_shared<Numbers>(length(count, rank_, uneven));
    std::vector<const char*> parts;
    std::vector<size_t> sizes;
    for (int to = 0; to < size_; ++to) inputs->push_back(values(seed + to, rank_, length(count, to, uneven)));
    for (auto& each : *inputs) parts.push_back(bytes(each)), sizes.push_back(4 * each.size());
    auto operation = make_reduce_scatter(*h_, bytes(*output), parts, sizes, NumberType::int32, Reduction::sum);
    return run("reduce_scatter", {operation}, [=, this] {
      for (size_t i = 0; i < output->size(); ++i) expect((*output)[i], sum_of(seed + rank_, size_, i), i);
      static_cast<void>(inputs);
    });
  }

  Running broadcast(uint64_t seed, size_t count, int root) {
    auto data = std::make_shared<Numbers>(values(seed, rank_, count));
    return run("broadcast", {make_broadcast(*h_, bytes(*data), 4 * count, root)}, [=, this] {
      for (size_t i = 0; i < count; ++i) expect((*data)[i], value(seed, root, i), i);
    });
  }

  // Uneven; with a root, only what goes to it.
  Running all_to_all(uint64_t seed, size_t count, int root) {
    auto sent = std::make_shared<std::vector<Numbers>>();
    auto received = std::make_shared<std::vector<Numbers>>();
    std::vector<Part> to, from;
    const auto many = [=](int a, int b) { return count * ((a + 2 * b) % 4) / 2; };
    for (int rank = 0; rank < size_; ++rank) {
      const bool sends = root < 0 || rank == root, receives = root < 0 || rank_ == root;
      sent->push_back(values(seed + rank, rank_, sends ? many(rank_, rank) : 0));
      received->emplace_back(receives ? many(rank, rank_) : 0);
      static char nothing;
      auto& out = sent->back();
      auto& in = received->back();
      to.push_back(sends ? Part{out.empty() ? &nothing : bytes(out), 4 * out.size()} : Part{nullptr, 0});
      from.push_back(receives ? Part{in.empty() ? &nothing : bytes(in), 4 * in.size()} : Part{nullptr, 0});
    }
    return run("all_to_all", make_all_to_all(*h_, to, from), [=, this] {
      for (int rank = 0; rank < size_; ++rank) {
        for (size_t i = 0; i < (*received)[rank].size(); ++i) expect((*received)[rank][i], value(seed + rank_, rank, i), i);
      }
      static_cast<void>(sent);
    });
  }

  void expect(int32_t got, int32_t wanted, size_t at) const {
    if (got == wanted) return;
    throw std::runtime_error("at " + std::to_string(at) + ": " + std::to_string(got) + ", not " + std::to_string(wanted));
  }

  const std::shared_ptr<Hierarchy> h_;
  const int rank_, size_;
};

void wait(const Running& running) {
  const auto until = std::chrono::steady_clock::now() + kLimit;
  while (!running.test()) {
    sched_yield();
    if (std::chrono::steady_clock::now() < until) continue;
    std::string late;
    for (const auto& each : running.transfers) late += each->stragglers() + "; " + each->lost();
    throw std::runtime_error(running.name + " is not done, waits for " + late);
  }
}

void run_rank(Setup& setup, int rank, int rounds, uint64_t seed) {
  const int size = static_cast<int>(setup.host_of.size());
  std::mt19937_64 random(seed), own(seed + 1 + rank);
  Rank ranks(join(setup, rank), rank, size);
  for (int round = 0; round < rounds; ++round) {
    std::vector<Running> running;
    const size_t at_once = 1 + random() % 4;
    while (running.size() < at_once) {
      running.push_back(ranks.start(random));
      if (own() % 2) running.back().test();
    }
    // Whichever is waited for first.
    for (size_t first = own() % at_once, i = 0; i < at_once; ++i) {
      const auto& each = running[(first + i) % at_once];
      wait(each);
      try {
        each.check();
      } catch (const std::exception& error) {
        throw std::runtime_error(each.name + " in round " + std::to_string(round) + ": " + error.what());
      }
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) return 2;
  Setup setup(arguments[1]);
  std::atomic<bool> failed{false};
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < setup.host_of.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        run_rank(setup, static_cast<int>(rank), std::atoi(arguments[2]), std::strtoull(arguments[3], nullptr, 10));
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %zu: %s\n", rank, error.what());
        failed = true;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  if (!failed) std::printf("ok\n");
  return failed ? 1 : 0;
}
