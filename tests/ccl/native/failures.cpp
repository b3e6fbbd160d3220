// Programs in which ranks call different operations, leave, or get connections from strangers.

#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <optional>
#include <stdexcept>

#include "intruders.hpp"
#include "programs.hpp"

namespace cpulaunch {

namespace {

using namespace std::chrono_literals;

constexpr auto kShortLimit = 300ms;  // for an operation that need not complete

// Runs each kind of operation once, with integers.  The last rank has a wrong one.
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

// The last rank passes an empty tensor.
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

void run_other_large_part(const Arguments& given) {
  run_unlike(given, sum_of(1'000'000, Call::Kind::all_to_all), sum_of(1'000'001, Call::Kind::all_to_all));
}

// Each rank considers itself the root of a broadcast, so none waits for the others before the next operation.
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

// The root of a broadcast has ended before the other rank calls something else.
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

// The last rank calls nothing, so the others wait for it.  One of them only sends.
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

// The last rank closes its connections in the middle of an operation, as if it were killed.
void run_killed(const Arguments& given) {
  Meeting meeting(given.host_of, 1);
  run_ranks(meeting.size(), [&](int rank) {
    Rank ranks(meeting, rank);
    const auto running = ranks.start(sum_of(8'000'000));
    for (int i = 0; i < 20; ++i) running.test();
    meeting.wait_for_all();
    if (rank < meeting.size() - 1) return running.wait(kLimit);
    running.abort();
  });
}

// Lets the process open `more` further descriptors.
void leave_descriptors(int more) {
  int lowest;
  do lowest = dup(STDERR_FILENO);  // takes the lowest free number, and is never closed
  while (lowest < 400);
  const auto most = static_cast<rlim_t>(lowest + 1 + more);
  const rlimit limit{most, most};
  setrlimit(RLIMIT_NOFILE, &limit);
}

// Runs two ranks of two hosts, which connect to each other.
void run_with_descriptors(const Arguments& given, int left) {
  Meeting meeting(given.host_of, 1);
  meeting.before_connecting = [&](auto&) { leave_descriptors(left); };
  run_ranks(meeting.size(), [&](int rank) {
    Rank ranks(meeting, rank);
    Call call = sum_of(1000);
    call.source.seed = 0;  // no rank has its tensor in shared memory, which would take a descriptor
    ranks.start(call).wait(kLimit);
  });
}

// Enough for both ends of two connections, as both ranks may open one, and for one more: accept4() needs a free number
// even if no connection waits.
void run_enough_descriptors(const Arguments& given) { run_with_descriptors(given, 5); }

// Enough for one end of a connection.
void run_few_descriptors(const Arguments& given) { run_with_descriptors(given, 1); }

// --- strangers

void run_with_strangers(const Arguments& given) {
  Meeting meeting(given.host_of, given.rounds * kMostAtOnce);
  std::optional<Strangers> strangers;
  meeting.before_connecting = [&](auto& addresses) { strangers.emplace(addresses); };
  run_ranks(meeting.size(), [&](int rank) { run_rounds(meeting, rank, given.rounds, std::mt19937_64(given.seed)); });
}

// A stranger changes messages.  The operation may fail in any way, but the process survives.
void run_garbled(const Arguments& given) {
  for (int round = 0; round < given.rounds; ++round) {
    std::optional<Garbler> garbler;  // ends after the group
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

}  // namespace

const std::vector<Program>& failing_programs() {
  static const std::vector<Program> all{
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
      {"another large part", run_other_large_part},
      {"killed", run_killed},
      {"another root", run_other_root},
      {"two roots of little", run_two_roots<1000>},
      {"two roots of much", run_two_roots<1 << 20>},
      {"ended root", run_ended_root},
      {"absent", run_absent},
      {"few descriptors", run_few_descriptors},
      {"enough descriptors", run_enough_descriptors},
      {"strangers", run_with_strangers},
      {"garbled", run_garbled},
  };
  return all;
}

}  // namespace cpulaunch
