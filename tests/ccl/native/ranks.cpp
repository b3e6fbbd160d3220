// Runs collectives of cpulaunch's own transport among ranks that are threads of this process, and checks every result.
// It doesn't use torch, so it can be compiled with sanitizers and for other processors.
//
//     ranks LAYOUT ROUNDS SEED [WHAT]        LAYOUT: the number of ranks on each host, such as 3,1
//
// WHAT is one of kPrograms; with " over libfabric" appended, libfabric connects the hosts.  If something is wrong,
// prints what, and exits with 1.

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>
#include <future>
#include <numeric>
#include <optional>
#include <sstream>
#include <stdexcept>

#include "counts.hpp"
#include "details.hpp"
#include "intruders.hpp"
#include "lent_threads.hpp"
#include "rank.hpp"

using namespace cpulaunch;
using namespace std::chrono_literals;

namespace {

constexpr auto kLimit = 30s;         // for one operation
constexpr auto kShortLimit = 300ms;  // for an operation that need not complete
constexpr int kMostAtOnce = 4;       // operations at the same time

struct Arguments {
  std::vector<int> host_of;
  int rounds;
  uint64_t seed;
};

// Calls `act` for each rank in its own thread.  Throws std::runtime_error with the texts of all exceptions.
void run_ranks(int ranks, const std::function<void(int)>& act) {
  std::mutex mutex;
  std::string errors;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        act(rank);
      } catch (const std::exception& error) {
        std::lock_guard<std::mutex> lock(mutex);
        errors += (errors.empty() ? "rank " : "\nrank ") + std::to_string(rank) + ": " + error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  if (!errors.empty()) throw std::runtime_error(errors);
}

// --- random collectives

// Waits for all operations, in any order.  Sometimes another thread also waits for one of them.
void wait_for_all(const std::vector<Running>& running, std::mt19937_64& own) {
  std::future<void> other;
  if (own() % 4 == 0) {
    const auto& one = running[own() % running.size()];
    other = std::async(std::launch::async, [&] { one.wait(kLimit); });
  }
  for (size_t first = own() % running.size(), i = 0; i < running.size(); ++i) {
    const auto& each = running[(first + i) % running.size()];
    each.wait(kLimit);
    each.check();
  }
  if (other.valid()) other.get();
}

// The ranks draw the same calls from `shared`, but each runs them in its own way.
void run_rounds(Meeting& meeting, int rank, int rounds, std::mt19937_64 shared) {
  Rank ranks(meeting, rank);
  std::mt19937_64 own(shared() + rank);
  for (int round = 0; round < rounds; ++round) {
    std::vector<Running> running;
    const size_t at_once = 1 + shared() % kMostAtOnce;
    while (running.size() < at_once) {
      running.push_back(ranks.start(Call::any(shared, meeting.size())));
      if (own() % 2) running.back().test();
    }
    wait_for_all(running, own);
  }
}

void run_mix(const Arguments& given) {
  Meeting meeting(given.host_of, given.rounds * kMostAtOnce);
  run_ranks(meeting.size(), [&](int rank) { run_rounds(meeting, rank, given.rounds, std::mt19937_64(given.seed)); });
}

// The ranks are placed on the sockets in turn.  On the fullest host, each socket has four ranks.
void run_sockets(const Arguments& given) {
  Meeting meeting(given.host_of, given.rounds * kMostAtOnce);
  const int sockets = Layout(given.host_of, 0).lanes / 4;
  for (int rank = 0; rank < meeting.size(); ++rank) meeting.socket_of.push_back(rank % sockets);
  if (Layout(given.host_of, 0, meeting.socket_of).counterparts.empty()) throw std::runtime_error("no sockets");
  run_ranks(meeting.size(), [&](int rank) { run_rounds(meeting, rank, given.rounds, std::mt19937_64(given.seed)); });
}

// --- ranks of several threads

constexpr int kThreads = 4;

// Each rank waits with its lent threads.  If a second thread of the rank also waits, it has no lent threads.
void run_teams(const Arguments& given) {
  Meeting meeting(given.host_of, given.rounds * kMostAtOnce);
  meeting.threads = kThreads;
  run_ranks(meeting.size(), [&](int rank) {
    LentThreads threads(kThreads);
    run_rounds(meeting, rank, given.rounds, std::mt19937_64(given.seed));
  });
}

// Returns what each thread of a rank has moved in an operation of this kind.
std::vector<Moved> moved_in(const Arguments& given, Call::Kind kind, int rank_to_look_at, int threads) {
  Meeting meeting(given.host_of, 1);
  meeting.threads = kThreads;
  std::vector<Moved> moved;
  run_ranks(meeting.size(), [&](int rank) {
    Rank ranks(meeting, rank);
    Call call{kind, {0, NumberType::float32}, 4'000'000};
    call.root = has_root(kind) ? 0 : -1;
    const auto running = ranks.start(call);
    LentThreads lent(threads);
    running.wait(kLimit);
    if (rank == rank_to_look_at) moved = lent.moved();
    running.check();
  });
  return moved;
}

void expect_even(const std::string& what, const std::vector<Moved>& moved, uint64_t all, uint64_t Moved::*count) {
  uint64_t total = 0;
  for (const auto& each : moved) total += each.*count;
  if (total != all) throw std::runtime_error(what + ": they move " + std::to_string(total) + " bytes");
  for (const auto& each : moved) {
    const double part = static_cast<double>(each.*count) * kThreads;
    if (part < 0.9 * all || part > 1.1 * all) {
      throw std::runtime_error(what + ": one moves " + std::to_string(each.*count) + " of " + std::to_string(all));
    }
  }
}

// All threads of a rank move about the same amount, and together no more than one thread alone.
void run_even_parts(const Arguments& given) {
  for (const auto kind : kKinds) {
    for (int rank = 0; rank < 2; ++rank) {
      const auto alone = moved_in(given, kind, rank, 1)[0];
      const auto moved = moved_in(given, kind, rank, kThreads);
      const auto what = std::string(Signature{kind}.call(Members{}).kind) + " on rank " + std::to_string(rank);
      expect_even(what + ", copies", moved, alone.copied, &Moved::copied);
      expect_even(what + ", sums", moved, alone.summed, &Moved::summed);
      if (alone.copied + alone.summed == 0) throw std::runtime_error(what + ": nothing is counted");
    }
  }
}

// Runs one operation of each kind on data that is larger than the caches.
void run_large(const Arguments& given) {
  Meeting meeting(given.host_of, std::size(kKinds));
  run_ranks(meeting.size(), [&](int rank) {
    Rank ranks(meeting, rank);
    for (const auto kind : kKinds) {
      Call call{kind, {given.seed, NumberType::int16}, 2'500'001};
      call.root = has_root(kind) ? 0 : -1;
      const auto running = ranks.start(call);
      running.wait(kLimit);
      running.check();
    }
  });
}

void run_narrow(const Arguments& given) {
  narrow_connections();
  run_mix(given);
}

// Each rank is in two groups, and uses both at the same time.  In the second group, ranks and hosts have the reverse
// order.
void run_two_groups(const Arguments& given) {
  const std::vector<int> opposite(given.host_of.rbegin(), given.host_of.rend());
  const size_t results = given.rounds * kMostAtOnce;
  Meeting first(given.host_of, results), second(opposite, results);
  run_ranks(first.size(), [&](int rank) {
    const int other = first.size() - 1 - rank;
    auto beside = std::async(std::launch::async,
                             [&] { run_rounds(second, other, given.rounds, std::mt19937_64(given.seed + 1)); });
    run_rounds(first, rank, given.rounds, std::mt19937_64(given.seed));
    beside.get();
  });
}

// --- many hosts

// Returns how often the ranks, one on each host, send in a small collective.  They are already connected.
uint64_t calls_in(const Arguments& given, Call::Kind kind) {
  Meeting meeting(given.host_of, 2);
  std::atomic<uint64_t> calls{0};
  run_ranks(meeting.size(), [&](int rank) {
    Rank ranks(meeting, rank);
    const Call call{kind, {1, NumberType::int32}, 8};
    for (int time = 0; time < 2; ++time) {
      const auto before = counts_of_this_thread();
      const auto running = ranks.start(call);
      while (!running.test()) std::this_thread::yield();
      running.check();
      if (time == 1) calls += (counts_of_this_thread() - before).sends;
    }
  });
  return calls;
}

void run_few_messages(const Arguments& given) {
  const auto hosts = given.host_of.size();
  uint64_t rounds = 0, in_rows = 0;
  while (uint64_t{1} << rounds < hosts) ++rounds;
  for (const int row : Layout(given.host_of, 0).grid) in_rows += row - 1;
  for (const auto& [kind, most] : {std::pair(Call::Kind::all_gather, rounds),
                                   std::pair(Call::Kind::reduce_scatter, in_rows),
                                   std::pair(Call::Kind::all_reduce, in_rows)}) {
    const auto calls = calls_in(given, kind);
    if (calls != hosts * most) {
      throw std::runtime_error(std::string(Signature{kind}.call(Members{}).kind) + ": " + std::to_string(calls));
    }
  }
}

// Returns the bytes that each rank sends in an operation on this many bytes, once all are connected.
std::vector<uint64_t> bytes_of(const Arguments& given, Call::Kind kind, size_t bytes) {
  Meeting meeting(given.host_of, 2);
  std::vector<uint64_t> all(meeting.size());
  run_ranks(meeting.size(), [&](int rank) {
    Rank ranks(meeting, rank);
    Call call{kind, {1, NumberType::int32}, bytes / 4};
    if (has_root(kind)) call.root = 0;
    for (int time = 0; time < 2; ++time) {
      const auto before = counts_of_this_thread();
      const auto running = ranks.start(call);
      running.wait(kLimit);
      running.check();
      all[rank] = (counts_of_this_thread() - before).sent_bytes;
    }
  });
  return all;
}

// Both numbers are multiples of the tensor's size; headers may add 2 %.
void expect_sent(const std::string& what, double sent, double most) {
  std::printf("%s sends %.3f times the tensor\n", what.c_str(), sent);
  if (sent > 1.02 * most) throw std::runtime_error(what + " sends more than " + std::to_string(most));
}

// In a reduce, all hosts together send each share to the root once.  In a broadcast, the root's host sends each byte
// once.
void run_few_bytes(const Arguments& given) {
  constexpr size_t kBytes = 4 << 20;
  const auto times = [](uint64_t bytes) { return static_cast<double>(bytes) / kBytes; };
  const auto total = [](const auto& all) { return std::accumulate(all.begin(), all.end(), uint64_t{0}); };
  const Layout layout(given.host_of, 0);
  const double hosts = layout.hosts;
  const auto reduce = bytes_of(given, Call::Kind::reduce, kBytes);
  expect_sent("a reduce", times(total(reduce)), hosts == 2 ? 1 : (hosts - 1) * (1 + 1 / hosts));
  const auto broadcast = bytes_of(given, Call::Kind::broadcast, kBytes);
  uint64_t by_root = 0;
  for (const int rank : layout.ranks_of[0]) by_root += broadcast[rank];
  expect_sent("the root's host", times(by_root), 1);
  expect_sent("a broadcast", times(total(broadcast)), hosts - 1);
}

// One rank waits for all others, and polls while none of them has sent anything.
void run_vain_polls(const Arguments& given) {
  constexpr int kPolls = 100;
  Meeting meeting(given.host_of, 0);
  uint64_t calls = 0;
  run_ranks(meeting.size(), [&](int rank) {
    Rank ranks(meeting, rank);
    const Call call{Call::Kind::all_to_all, {1, NumberType::int32}, 8};
    ranks.start(call).wait(kLimit);
    meeting.wait_for_all();
    std::optional<Running> running;
    if (rank == 0) {
      const auto before = counts_of_this_thread();
      running.emplace(ranks.start(call));
      for (int i = 0; i < kPolls; ++i) running->test();
      const auto since = counts_of_this_thread() - before;
      calls = since.receives + since.vain;
    }
    meeting.wait_for_all();
    if (rank != 0) running.emplace(ranks.start(call));
    running->wait(kLimit);
    running->check();
  });
  // Late data of the previous call may still arrive, once on each connection.
  const auto most = uint64_t(2 * (meeting.size() - 1));
  if (calls > most) throw std::runtime_error(std::to_string(calls) + " calls of the kernel");
}

// --- groups that come and go

size_t open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

size_t shared_mappings() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("cpulaunch-ccl") != std::string::npos;
  return count;
}

// Every third group ends with an operation in which the last rank doesn't take part, so that the others give up.  They
// do that only after all have completed the previous operation, because a rank that gives up resets its counters.
void use_once(Meeting& meeting, int rank, uint64_t number, std::mt19937_64 shared) {
  Rank ranks(meeting, rank);
  const auto running = ranks.start(Call::any(shared, meeting.size()));
  running.wait(kLimit);
  running.check();
  if (number % 3 != 0) return;
  meeting.wait_for_all();
  if (rank == meeting.size() - 1) return;
  const auto given_up = ranks.start(Call::any(shared, meeting.size()));
  for (int i = 0; i < 10; ++i) given_up.test();
  given_up.abort();
}

void run_many_groups(const Arguments& given) {
  const auto descriptors = open_descriptors();
  std::deque<Meeting> meetings;
  for (int i = 0; i < given.rounds; ++i) meetings.emplace_back(given.host_of, 2);
  run_ranks(meetings.front().size(), [&](int rank) {
    for (int i = 0; i < given.rounds; ++i) use_once(meetings[i], rank, i, std::mt19937_64(given.seed + i));
  });
  if (shared_mappings() > 0) throw std::runtime_error("mappings are left");
  if (open_descriptors() != descriptors) throw std::runtime_error("descriptors are left");
}

// --- mistakes that must be detected

// Runs each kind of operation once, with whole numbers, one of which is wrong on the last rank.
void run_wrong_numbers(const Arguments& given) {
  Meeting meeting(given.host_of, std::size(kKinds));
  const int last = meeting.size() - 1;
  run_ranks(meeting.size(), [&](int rank) {
    Rank ranks(meeting, rank);
    ranks.wrong = rank == last;
    std::string errors;
    for (const auto kind : kKinds) {
      Call call{kind, {given.seed, NumberType::int32}, 1000};
      if (has_root(kind)) call.root = last;
      const auto running = ranks.start(call);
      running.wait(kLimit);
      try {
        running.check();
      } catch (const std::exception& error) {
        errors += std::string(errors.empty() ? "" : "; ") + error.what();
      }
    }
    if (!errors.empty()) throw std::runtime_error(errors);
  });
}

void run_unlike(const Arguments& given, const Call& first, const Call& last) {
  Meeting meeting(given.host_of, 1);
  run_ranks(meeting.size(), [&](int rank) {
    Rank ranks(meeting, rank);
    ranks.start(rank == meeting.size() - 1 ? last : first).wait(kLimit);
  });
}

Call sum_of(size_t count, Call::Kind kind = Call::Kind::all_reduce) { return {kind, {1, NumberType::int32}, count}; }

void run_other_collective(const Arguments& given) {
  run_unlike(given, sum_of(1000), sum_of(1000, Call::Kind::reduce_scatter));
}

void run_other_movement(const Arguments& given) {
  run_unlike(given, sum_of(1000), sum_of(1000, Call::Kind::all_gather));
}

void run_other_size(const Arguments& given) { run_unlike(given, sum_of(1000), sum_of(1001)); }

// One rank has no data: in a sum, and in operations that copy.
template <Call::Kind kind>
void run_nothing(const Arguments& given) {
  Call some = sum_of(1000, kind);
  some.root = 0;
  Call nothing = some;
  nothing.count = 0;
  run_unlike(given, some, nothing);
}

void run_other_wire(const Arguments& given) {
  Call exact{Call::Kind::all_reduce, {1, NumberType::float32}, 1000}, compressed = exact;
  compressed.wire = Wire::bfloat16;
  run_unlike(given, exact, compressed);
}

void run_other_part(const Arguments& given) {
  run_unlike(given, sum_of(1000, Call::Kind::all_to_all), sum_of(1001, Call::Kind::all_to_all));
}

// Each rank considers itself the root, so none waits for the others before the next operation.
void run_other_root(const Arguments& given) {
  Meeting meeting(given.host_of, 1);
  run_ranks(meeting.size(), [&](int rank) {
    Rank ranks(meeting, rank);
    Call call = sum_of(1000, Call::Kind::broadcast);
    call.root = rank;
    ranks.start(call).wait(kLimit);
    ranks.start(sum_of(1000)).wait(kLimit);
  });
}

// Each rank considers itself the root of a reduce, and waits for the others.
template <size_t numbers>
void run_two_roots(const Arguments& given) {
  Meeting meeting(given.host_of, 0);
  run_ranks(meeting.size(), [&](int rank) {
    Rank ranks(meeting, rank);
    Call call = sum_of(numbers, Call::Kind::reduce);
    call.root = rank;
    ranks.start(call).wait(kShortLimit);
  });
}

// When the other rank calls something else, the root has already ended and can't be reached any more.
void run_ended_root(const Arguments& given) {
  Meeting meeting(given.host_of, 1);
  Call call = sum_of(1000, Call::Kind::broadcast);
  call.root = 0;
  std::atomic<bool> has_ended{false};
  run_ranks(meeting.size(), [&](int rank) {
    auto ranks = std::make_unique<Rank>(meeting, rank);
    if (rank == 0) {
      ranks->start(call).wait(kLimit);
      ranks.reset();
      has_ended = true;
      return;
    }
    while (!has_ended) std::this_thread::sleep_for(1ms);
    ranks->start(sum_of(1000)).wait(kLimit);
  });
}

// The last rank calls nothing, so the others wait for it, even the one that only sends.
void run_absent(const Arguments& given) {
  narrow_connections();
  Meeting meeting(given.host_of, 1);
  Call call = sum_of(1'000'000, Call::Kind::broadcast);
  call.root = 0;
  std::atomic<int> others{meeting.size() - 1};
  run_ranks(meeting.size(), [&](int rank) {
    Rank ranks(meeting, rank);
    if (rank == meeting.size() - 1) {
      while (others > 0) std::this_thread::sleep_for(1ms);
      return;
    }
    const auto running = ranks.start(call);
    const std::shared_ptr<void> ends(nullptr, [&](void*) { --others; });
    running.wait(kShortLimit);
  });
}

// From now on, at most `more` descriptors can be opened.
void leave_descriptors(int more) {
  int lowest;
  do lowest = dup(STDERR_FILENO);  // never closed: each takes the lowest free number
  while (lowest < 400);
  const auto most = static_cast<rlim_t>(lowest + 1 + more);
  const rlimit limit{most, most};
  setrlimit(RLIMIT_NOFILE, &limit);
}

// Two ranks on two hosts, which connect to each other.
void run_with_descriptors(const Arguments& given, int left) {
  Meeting meeting(given.host_of, 1);
  meeting.before_connecting = [&](auto&) { leave_descriptors(left); };
  run_ranks(meeting.size(), [&](int rank) {
    Rank ranks(meeting, rank);
    Call call = sum_of(1000);
    call.source.seed = 0;  // keeps all tensors out of shared memory, which would take a descriptor
    ranks.start(call).wait(kLimit);
  });
}

// Enough for both ends of two connections, and for the descriptor that accept4() holds for a moment even if nobody has
// connected yet: one of the two ranks may be in accept4() then.
void run_enough_descriptors(const Arguments& given) { run_with_descriptors(given, 5); }

// Too few for the other ends of the connections.
void run_few_descriptors(const Arguments& given) { run_with_descriptors(given, 2); }

// With many ranks, each tensor takes one piece for each host, however small each rank's part of a slot is.  Nothing
// runs.
void run_pieces(const Arguments& given) {
  const Layout layout(given.host_of, 0);
  Hierarchy own(layout, nullptr, nullptr);
  Numbers numbers(NumberType::int32, 20);
  const std::vector<size_t> sizes(layout.size, numbers.bytes());
  const auto gather = make_all_gather(own, numbers.data(), std::vector<char*>(layout.size, numbers.data()), sizes);
  const auto scatter =
      make_reduce_scatter(own, numbers.data(), std::vector<const char*>(layout.size, numbers.data()), sizes,
                          numbers.type, Reduction::sum);
  for (const auto& each : {gather, scatter}) {
    const auto hosts = static_cast<uint64_t>(layout.hosts);
    if (each->pieces() != hosts) throw std::runtime_error(std::to_string(each->pieces()) + " pieces");
  }
}

// --- connections that don't come from the peers

void run_with_strangers(const Arguments& given) {
  Meeting meeting(given.host_of, given.rounds * kMostAtOnce);
  std::optional<Strangers> strangers;
  meeting.before_connecting = [&](auto& addresses) { strangers.emplace(addresses); };
  run_ranks(meeting.size(), [&](int rank) { run_rounds(meeting, rank, given.rounds, std::mt19937_64(given.seed)); });
}

// After messages have been changed, an operation may end in any way, but the process must survive.
void run_garbled(const Arguments& given) {
  for (int round = 0; round < given.rounds; ++round) {
    std::optional<Garbler> garbler;  // destroyed after the group
    Meeting meeting(given.host_of, 1);
    meeting.before_connecting = [&](auto& addresses) { garbler.emplace(addresses, given.seed + round); };
    const auto call = [&](int rank) {
      Rank ranks(meeting, rank);
      std::mt19937_64 random(given.seed + round);
      const auto running = ranks.start(Call::any(random, meeting.size()));
      running.wait(kShortLimit);
      running.check();
    };
    try {
      run_ranks(meeting.size(), call);
    } catch (const std::exception& error) {
      std::printf("%s\n", error.what());
    }
  }
}

void run_rounding(const Arguments& given) { check_rounding(given.seed, given.rounds); }

// Runs a check that makes its own ranks.
template <void check()>
void run_check(const Arguments&) {
  check();
}

// --- the command line

struct Program {
  const char* name;
  void (*run)(const Arguments&);
};
constexpr Program kPrograms[] = {
    {"mix", run_mix},
    {"sockets", run_sockets},
    {"teams", run_teams},
    {"even parts", run_even_parts},
    {"few messages", run_few_messages},
    {"few bytes", run_few_bytes},
    {"vain polls", run_vain_polls},
    {"steps", [](const Arguments& given) { print_steps(given.host_of); }},
    {"counts", [](const Arguments& given) { print_counts(given.host_of); }},
    {"large", run_large},
    {"narrow connections", run_narrow},
    {"two groups", run_two_groups},
    {"many groups", run_many_groups},
    {"wrong numbers", run_wrong_numbers},
    {"another collective", run_other_collective},
    {"another movement", run_other_movement},
    {"another size", run_other_size},
    {"no sum", run_nothing<Call::Kind::all_reduce>},
    {"no part of a sum", run_nothing<Call::Kind::reduce_scatter>},
    {"no parts", run_nothing<Call::Kind::all_gather>},
    {"no broadcast", run_nothing<Call::Kind::broadcast>},
    {"another wire", run_other_wire},
    {"another part", run_other_part},
    {"another root", run_other_root},
    {"two roots of little", run_two_roots<1000>},
    {"two roots of much", run_two_roots<1 << 20>},
    {"ended root", run_ended_root},
    {"absent", run_absent},
    {"few descriptors", run_few_descriptors},
    {"enough descriptors", run_enough_descriptors},
    {"pieces", run_pieces},
    {"strangers", run_with_strangers},
    {"garbled", run_garbled},
    {"rounding", run_rounding},
    {"a piece exchanged once", run_check<check_exchanged_once>},
    {"other sizes", run_check<check_other_sizes>},
    {"freed blocks", run_check<check_freed_blocks>},
    {"spare blocks", run_check<check_spare_blocks>},
    {"forked tensors", run_check<check_forked_tensors>},
    {"subnormal sums", run_check<check_subnormal_sums>},
    {"an endless message", run_check<check_endless_message>},
    {"seals", run_check<check_seals>},
    {"a crowd", [](const Arguments&) { check_crowd("127.0.0.2"); }},
    {"a crowd beside a rank", [](const Arguments&) { check_crowd("127.0.0.1"); }},
    {"proofs", run_check<check_proofs>},
    {"idle memory", run_check<check_idle_memory>},
    {"pace", run_check<check_pace>},
    {"sources", run_check<check_sources>},
};

constexpr char kOverLibfabric[] = " over libfabric";

std::vector<int> hosts_of(const std::string& layout) {
  std::vector<int> host_of;
  std::istringstream numbers(layout);
  std::string number;
  for (int host = 0; std::getline(numbers, number, ','); ++host) {
    for (int i = 0; i < std::stoi(number); ++i) host_of.push_back(host);
  }
  return host_of;
}

// Each connection takes two descriptors, because both of its ends are in this process.
void allow_many_descriptors() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

int main(int count, char** arguments) {
  std::string wanted = count > 4 ? arguments[4] : "mix";
  if (const auto at = wanted.find(kOverLibfabric); at != std::string::npos) {
    use_libfabric();
    wanted.erase(at);
  }
  const auto* program = std::find_if(std::begin(kPrograms), std::end(kPrograms),
                                     [&](const Program& each) { return each.name == wanted; });
  if (count < 4 || program == std::end(kPrograms)) return 2;
  allow_many_descriptors();
  try {
    program->run({hosts_of(arguments[1]), std::atoi(arguments[2]), std::strtoull(arguments[3], nullptr, 10)});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::printf("ok\n");
  std::fflush(stdout);  // must come before a sanitizer looks for leaks
  return 0;
}
