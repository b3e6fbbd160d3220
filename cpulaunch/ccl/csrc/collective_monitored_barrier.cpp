// monitored_barrier: a barrier that names the ranks that don't come.

#include <thread>

#include "group.hpp"

namespace cpulaunch {

namespace {

// How often rank 0 looks who has come.
constexpr auto kInterval = std::chrono::milliseconds(5);

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

// Through the store, so that it works however little the ranks agree on.  Each rank writes a key; rank 0 then writes
// who is missing, "" for nobody.
void ProcessGroupCCL::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const auto timeout = opts.timeout == c10d::kUnsetTimeout ? timeout_ : opts.timeout;
  const auto seconds = timeout.count() / 1e3;
  const auto prefix = c10::str("monitored_barrier/", monitored_barriers_++, "/");
  const auto answer = prefix + "missing";
  const auto until = Clock::now() + timeout;
  if (getRank() != 0) {
    store_->set(c10::str(prefix, getRank()), bytes_of(""));
    while (!store_->check({answer})) {
      if (Clock::now() > until) {
        C10_THROW_ERROR(DistBackendError, c10::str("Rank ", getRank(), " reached monitoredBarrier, which rank 0 did ",
                                                   "not confirm within ", seconds, " s"));
      }
      std::this_thread::sleep_for(kInterval);
    }
    const auto missing = store_->get(answer);
    const auto readers = c10::str(prefix, "read");
    if (store_->add(readers, 1) == getSize() - 1) {
      store_->deleteKey(answer);
      store_->deleteKey(readers);
    }
    TORCH_CHECK_WITH(DistBackendError, missing.empty(), std::string(missing.begin(), missing.end()));
    return;
  }
  std::vector<std::string> keys;
  for (int rank = 1; rank < getSize(); ++rank) keys.push_back(c10::str(prefix, rank));
  while (!keys.empty() && !store_->check(keys) && Clock::now() < until) std::this_thread::sleep_for(kInterval);
  std::string missing;
  for (int rank = 1; rank < getSize() && (wait_all_ranks || missing.empty()); ++rank) {
    if (!store_->check({c10::str(prefix, rank)})) missing += c10::str(missing.empty() ? "" : ", ", rank);
  }
  if (!missing.empty()) {
    missing = c10::str("Rank 0 timed out in monitoredBarrier after ", seconds, " s: rank ", missing,
                       " did not reach it");
  }
  if (getSize() > 1) store_->set(answer, bytes_of(missing));
  TORCH_CHECK_WITH(DistBackendError, missing.empty(), missing);
  for (const auto& key : keys) store_->deleteKey(key);
}

}  // namespace cpulaunch
