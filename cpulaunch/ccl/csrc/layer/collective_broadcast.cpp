// broadcast, barrier, and monitored_barrier, which names the ranks that do not reach it.

#include <thread>

#include "buffers.hpp"
#include "group.hpp"
#include "reduction.hpp"

namespace cpulaunch {

using c10d::OpType;

namespace {

// How often a rank of a monitored barrier looks into the store.
constexpr auto kBarrierInterval = std::chrono::milliseconds(5);
// The longest time that rank 0 waits for the others to read its answer.  A rank that reached the barrier may have
// ended.
constexpr auto kReadTime = std::chrono::seconds(5);

std::vector<uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const Invalid invalid{"broadcast"};
  const auto& tensor = single(invalid, tensors);
  c10d::assertRootRank(invalid, opts.rootRank, getSize());
  check_tensor(invalid, tensor);
  const auto work = begin(OpType::BROADCAST, "broadcast", "ccl:broadcast", tensors, opts.timeout);
  work->says(static_cast<int>(opts.rootRank));
  const auto data = getRank() == opts.rootRank ? to_send(*work, tensor) : to_receive(*work, tensor);
  work->set_outputs(tensors);
  Collective collective{Kind::broadcast};
  collective.root = static_cast<int>(opts.rootRank);
  collective.received = {part_of(data)};
  return run(work, opts.asyncOp, &collective);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::barrier(const c10d::BarrierOptions& opts) {
  const auto work = begin(OpType::BARRIER, "barrier", "ccl:barrier", {}, opts.timeout);
  const auto token = at::zeros({1}, at::kByte);
  work->keep(token);
  auto collective = reduction(Kind::barrier, token, c10d::ReduceOp::MAX);
  collective.received = {part_of(token)};
  return run(work, opts.asyncOp, &collective);
}

// Uses the store, so it works even if the ranks call different collectives.  Each rank writes a key.  Rank 0 then
// writes which ranks are missing ("" if none) and waits until the others have read that, because the store may end with
// rank 0.
void ProcessGroupCCL::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const auto& members = state_->members;
  const auto timeout = opts.timeout == c10d::kUnsetTimeout ? timeout_ : opts.timeout;
  const auto seconds = timeout.count() / 1e3;
  const auto prefix = c10::str("monitored_barrier/", monitored_barriers_++, "/");
  const auto answer = prefix + "missing", readers = prefix + "read";
  const auto until = Clock::now() + timeout;
  if (getRank() != 0) {
    store_->set(c10::str(prefix, getRank()), to_bytes(""));
    while (!store_->check({answer})) {
      if (Clock::now() > until) {
        throw_for(Cause(CauseKind::peer_late, members, 0),
                  c10::str("this rank reached monitoredBarrier, which ", members.name(0), " did not confirm within ",
                           seconds, " s"));
      }
      std::this_thread::sleep_for(kBarrierInterval);
    }
    const auto missing = store_->get(answer);
    store_->add(readers, 1);  // this rank's last use of the store
    if (missing.empty()) return;
    Cause cause(CauseKind::peer_late);
    cause.finder = members.number_of(0);
    throw_for(cause, std::string(missing.begin(), missing.end()));
  }
  if (getSize() == 1) return;
  std::vector<std::string> keys, late;
  Cause cause;
  for (int rank = 1; rank < getSize(); ++rank) keys.push_back(c10::str(prefix, rank));
  bool all = store_->check(keys);
  for (; !all && Clock::now() < until; all = store_->check(keys)) std::this_thread::sleep_for(kBarrierInterval);
  for (int rank = 1; rank < getSize() && !all; ++rank) {
    if (store_->check({keys[rank - 1]})) continue;
    if (late.empty()) cause = Cause(CauseKind::peer_late, members, rank);
    late.push_back(members.name(rank));
  }
  std::string missing;
  if (!late.empty()) {
    // Begins like gloo's message, which torch's tests look for.
    missing = c10::str("Rank ", members.number_of(0), " timed out in monitoredBarrier after ", seconds, " s: ",
                       wait_all_ranks ? c10::Join(", ", late) : late[0], " did not reach it");
  }
  store_->set(answer, to_bytes(missing));
  const auto expected = static_cast<int64_t>(keys.size() - late.size());
  const auto read_until = Clock::now() + kReadTime;
  while (store_->add(readers, 0) < expected && Clock::now() < read_until) std::this_thread::sleep_for(kBarrierInterval);
  if (!missing.empty()) throw_for(cause, missing);
  keys.insert(keys.end(), {answer, readers});
  for (const auto& key : keys) store_->deleteKey(key);
}

}  // namespace cpulaunch
