// Threads that make groups and operations in one ledger, as a program's threads and ccl's own do.

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ledger.hpp"

using namespace cpulaunch;

namespace {

constexpr int kThreads = 4, kGroups = 50, kCalls = 200;
const char kType[sizeof(ledger::Operation::type)] = "float32";

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

void call(LedgerGroup& group, int count) {
  for (int i = 0; i < count; ++i) {
    LedgerEntry entry(group, i, "all_reduce", kType, 4, -1, ledger::now());
    entry.start();
    entry.waits_for("10, 11, 12, 13, 14");
    entry.end(/*failed=*/false);
  }
}

}  // namespace

int main() {
  auto memory = std::make_unique<char[]>(ledger::kSize);
  ledger::open(memory.get());
  auto& seen = *reinterpret_cast<ledger::File*>(memory.get());
  {
    LedgerGroup shared("ccl", "shared", 0, 2, "0-1");
    LedgerEntry hanging(shared, 0, "broadcast", kType, 4, -1, ledger::now());
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&shared] {
        for (int n = 0; n < kGroups; ++n) {
          LedgerGroup own("ccl", "own", 0, 2, "0-1");
          call(own, 3);
        }
        call(shared, kCalls);
      });
    }
    for (auto& thread : threads) thread.join();
    expect(seen.collectives == kThreads * (3 * kGroups + kCalls), "every operation counts once");
    expect(seen.groups[0].count == kThreads * kCalls + 1, "the shared group has all of its own");
    expect(seen.groups[0].operations[0].state == ledger::Operation::enqueued, "what hangs stays");
    expect(std::string(reinterpret_cast<char*>(seen.groups[0].operations[1].waits_for)) == "10, 11, 12, …",
           "only whole numbers are shown");
    int open = 0;
    for (auto& group : seen.groups) open += group.state == ledger::Group::open;
    expect(open == 1, "groups that are gone are closed");
  }
  expect(seen.groups[0].operations[0].state == ledger::Operation::failed, "what never ended has failed");
  std::puts("ok");
}
