// Names the ranks of a group in messages.

#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace cpulaunch {

// Ranks are named by their numbers in the job, which are the same in all groups and on all ranks.
class Members {
 public:
  // For groups in which the ranks have the same numbers as in the job.
  Members() = default;
  // `ranks` are the numbers of the group's ranks in the job.  `hosts` are the names of their hosts, or empty if there
  // is only one host.
  Members(std::vector<int> ranks, std::vector<std::string> hosts)
      : ranks_(std::move(ranks)), hosts_(std::move(hosts)) {}

  // Returns an invalid rank unchanged: it may have come over the network.
  int number_of(int rank) const { return static_cast<size_t>(rank) < ranks_.size() ? ranks_[rank] : rank; }
  // "" if all ranks are on one host.
  std::string host_of(int rank) const { return hosts_.empty() ? "" : hosts_.at(rank); }
  // Such as "rank 3 on node1".
  std::string name(int rank) const {
    const auto name = "rank " + std::to_string(number_of(rank));
    return hosts_.empty() ? name : name + " on " + hosts_.at(rank);
  }

 private:
  std::vector<int> ranks_;
  std::vector<std::string> hosts_;
};

}  // namespace cpulaunch
