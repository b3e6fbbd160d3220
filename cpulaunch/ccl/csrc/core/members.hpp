// How messages name the ranks of a group.

#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace cpulaunch {

// By their numbers in the job, which mean the same in all groups and on all ranks.
class Members {
 public:
  // Ranks have the same numbers in the job as in the group.
  Members() = default;
  // `ranks` are the numbers that the group's ranks have in the job; `hosts` are the names of their hosts, empty where
  // there is one.
  Members(std::vector<int> ranks, std::vector<std::string> hosts)
      : ranks_(std::move(ranks)), hosts_(std::move(hosts)) {}

  // Of what is no rank of the group, that number itself: it may have come over the network.
  int number_of(int rank) const { return static_cast<size_t>(rank) < ranks_.size() ? ranks_[rank] : rank; }
  // "" where all are on one.
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
