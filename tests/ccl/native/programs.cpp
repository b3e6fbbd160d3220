#include "programs.hpp"

#include <future>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

#include "lent_threads.hpp"

namespace cpulaunch {

namespace {

// Waits for all operations, in any order.  Now and then another thread waits, too.
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

}  // namespace

void run_ranks(int ranks, const std::function<void(int)>& act) {
  std::mutex mutex;
  std::string errors;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        std::optional<LentThreads> threads;
        if (const auto count = connections_between_ranks(); count > 1) threads.emplace(count);  // each drives one
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

}  // namespace cpulaunch
