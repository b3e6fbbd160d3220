// Runs collectives of cpulaunch's own transport among ranks that are threads of this process, and checks every result.
// It doesn't need torch, so it can be compiled with sanitizers and for other processors.
//
//     ranks LAYOUT ROUNDS SEED [WHAT]        LAYOUT: the number of ranks on each host, such as 3,1
//
// WHAT names a program, of kPrograms or failing_programs().  It may end with " over libfabric", which then connects the
// hosts, or with " over N connections", of which two ranks of different hosts then have N.  Exits with 1, and an error,
// if something is wrong.

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
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
#include "programs.hpp"

using namespace cpulaunch;
using namespace std::chrono_literals;

namespace {

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
constexpr size_t kLargeCount = 4'000'000;  // of numbers

// Each rank waits with its threads.  If another thread of the rank waits, too, it has no others.
void run_teams(const Arguments& given) {
  Meeting meeting(given.host_of, given.rounds * kMostAtOnce);
  meeting.threads = kThreads;
  run_ranks(meeting.size(), [&](int rank) {
    LentThreads threads(kThreads);
    run_rounds(meeting, rank, given.rounds, std::mt19937_64(given.seed));
  });
}

// --- several connections between two ranks

uint64_t most_bytes(const std::vector<Counts>& traffic) {
  uint64_t most = 0;
  for (const auto& each : traffic) most = std::max(most, each.sent_bytes + each.received_bytes);
  return most;
}

// Returns the system calls of each thread of rank 0 in a large operation of this kind.  Each drives one connection.  If
// the other rank gets no processor for a while, the threads leave the rest to one of them, so this is the most even of
// several operations.
std::vector<Counts> traffic_of(const Arguments& given, Call::Kind kind, size_t connections) {
  constexpr int kTimes = 3;
  use_connections(connections);
  Meeting meeting(given.host_of, kTimes);
  std::vector<Counts> traffic;
  run_ranks(meeting.size(), [&](int rank) {
    Rank ranks(meeting, rank);
    LentThreads threads(connections);
    const bool is_whole = kind == Call::Kind::all_reduce || has_root(kind);  // else there is a tensor for each rank
    Call call{kind, {0, NumberType::float32}, is_whole ? kLargeCount : kLargeCount / meeting.size()};
    if (has_root(kind)) call.root = 0;
    for (int time = 0; time < kTimes; ++time) {  // the first operation opens the connections
      const auto before = threads.counts();
      const auto running = ranks.start(call);
      running.wait(kLimit);
      running.check();
      if (rank != 0 || time == 0) continue;
      auto since = threads.counts();
      for (size_t i = 0; i < connections; ++i) since[i] = since[i] - before[i];
      if (traffic.empty() || most_bytes(since) < most_bytes(traffic)) traffic = since;
    }
  });
  return traffic;
}

// Prints a line for each kind and count: with one connection (`alone`), and by each thread with several.
void run_even_connections(const Arguments& given) {
  static constexpr std::pair<const char*, uint64_t Counts::*> kCounts[] = {
      {"sent", &Counts::sent_bytes}, {"received", &Counts::received_bytes},
      {"sends", &Counts::sends}, {"receives", &Counts::receives}};
  const size_t connections = connections_between_ranks();
  for (const auto kind : kKinds) {
    const auto alone = traffic_of(given, kind, 1)[0];
    const auto traffic = traffic_of(given, kind, connections);
    for (const auto& [name, count] : kCounts) {
      std::printf("%s %s: alone=%lu", Signature{kind}.call(Members{}).kind, name, alone.*count);
      for (size_t thread = 0; thread < connections; ++thread) std::printf(" by%zu=%lu", thread, traffic[thread].*count);
      std::printf("\n");
    }
  }
}

// --- what the threads copy and sum

// Returns what each of a rank's threads has moved in an operation of this kind.
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

// Each of a rank's threads moves an equal part, and all together move no more than one does alone.
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

// Runs each kind of operation with tensors that are larger than the caches.
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

// Returns how many messages the ranks send in a small collective.  Each host has one rank.
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

// Returns how many bytes each rank sends in an operation on a tensor of `bytes`.
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

// `sent` and `most` are multiples of the tensor's size.  2 % are for headers.
void expect_sent(const std::string& what, double sent, double most) {
  std::printf("%s sends %.3f times the tensor\n", what.c_str(), sent);
  if (sent > 1.02 * most) throw std::runtime_error(what + " sends more than " + std::to_string(most));
}

// In a reduce, all hosts together send the root each share once.  In a broadcast, the root's host sends each byte once.
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
  // Late messages of the previous call may still arrive, one on each connection.
  const auto most = uint64_t(2 * (meeting.size() - 1));
  if (calls > most) throw std::runtime_error(std::to_string(calls) + " calls of the kernel");
}

// With thousands of ranks on a host, a collective still takes one piece for each host.  Nothing runs.
void run_pieces(const Arguments& given) {
  const Layout layout(given.host_of, 0);
  Hierarchy own(layout, nullptr, nullptr);
  Numbers numbers(NumberType::int32, 20);
  const Parts parts(layout.size, {numbers.data(), numbers.bytes()});
  const auto gather = make_all_gather(own, numbers.data(), parts);
  const auto scatter = make_reduce_scatter(own, numbers.data(), parts, numbers.type, Reduction::sum);
  for (const auto& each : {gather, scatter}) {
    const auto hosts = static_cast<uint64_t>(layout.hosts);
    if (each->pieces() != hosts) throw std::runtime_error(std::to_string(each->pieces()) + " pieces");
  }
}

// --- groups that come and go

size_t shared_mappings() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("cpulaunch-ccl") != std::string::npos;
  return count;
}

// Every third group ends with an operation that the last rank doesn't call, so the others abort it.  They do so after
// all have completed the previous one, because an abort also resets what the other local ranks still read.
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

void run_rounding(const Arguments& given) { check_rounding(given.seed, given.rounds); }

// Runs a check of details.hpp, which makes its own ranks.
template <void check()>
void run_check(const Arguments&) {
  check();
}

// --- the command line

constexpr Program kPrograms[] = {
    {"mix", run_mix},
    {"sockets", run_sockets},
    {"teams", run_teams},
    {"even parts", run_even_parts},
    {"even connections", run_even_connections},
    {"few messages", run_few_messages},
    {"few bytes", run_few_bytes},
    {"vain polls", run_vain_polls},
    {"steps", [](const Arguments& given) { print_steps(given.host_of); }},
    {"counts", [](const Arguments& given) { print_counts(given.host_of); }},
    {"large", run_large},
    {"narrow connections", run_narrow},
    {"two groups", run_two_groups},
    {"many groups", run_many_groups},
    {"pieces", run_pieces},
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
    {"pool", run_check<check_pool>},
    {"sources", run_check<check_sources>},
    {"one connection", run_check<check_one_connection>},
    {"separate connections", run_check<check_separate_connections>},
    {"two connections", run_check<check_two_connections>},
    {"who has left", run_check<check_who_has_left>},
    {"a stranger at an address", run_check<check_stranger_at_address>},
    {"the last data", run_check<check_last_data>},
    {"the last data before a hello", run_check<check_data_before_hello>},
    {"a late reader", run_check<check_late_reader>},
    {"a hello of a reader", run_check<check_reader_says_hello>},
    {"a short outage", run_check<check_short_outage>},
    {"a question to a root", run_check<check_asked_root>},
};

constexpr char kOver[] = " over ", kLibfabric[] = "libfabric", kShared[] = "shared connections";

std::vector<int> hosts_of(const std::string& layout) {
  std::vector<int> host_of;
  std::istringstream numbers(layout);
  std::string number;
  for (int host = 0; std::getline(numbers, number, ','); ++host) {
    for (int i = 0; i < std::stoi(number); ++i) host_of.push_back(host);
  }
  return host_of;
}

// Both ends of each connection are in this process.
void allow_many_descriptors() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

int main(int count, char** arguments) {
  std::string wanted = count > 4 ? arguments[4] : "mix";
  if (const auto at = wanted.find(kOver); at != std::string::npos) {
    const auto over = wanted.substr(at + std::strlen(kOver));
    if (over == kLibfabric) {
      use_libfabric();
    } else if (over == kShared) {
      share_connections();
    } else {
      use_connections(std::stoul(over));
    }
    wanted.erase(at);
  }
  std::vector<Program> programs(std::begin(kPrograms), std::end(kPrograms));
  programs.insert(programs.end(), failing_programs().begin(), failing_programs().end());
  const auto program = std::find_if(programs.begin(), programs.end(),
                                    [&](const Program& each) { return each.name == wanted; });
  if (count < 4 || program == programs.end()) return 2;
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
