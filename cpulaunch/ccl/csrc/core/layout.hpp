// Which ranks of a group share a host, and a socket.

#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include "copy.hpp"
#include "members.hpp"

namespace cpulaunch {

// Hosts are numbered in the order of their first ranks, and the ranks of a host, its local ranks, in their order in the
// group.  Between hosts, data travels in lanes: there are as many as local ranks on the fullest host, and on each host
// one local rank sends and receives what belongs to a lane.
struct Layout {
  // `host_of` has for each rank whatever identifies its host, and `socket_of` the socket of that host that it runs on,
  // or -1; empty: unknown.  `members` is how messages name the ranks.  Each rank computes with `threads`, or more.
  Layout(const std::vector<int>& host_of, int rank, const std::vector<int>& socket_of = {}, Members members = {},
         int threads = 1)
      : members(std::move(members)), rank(rank), size(static_cast<int>(host_of.size())), threads(threads) {
    std::map<int, int> numbers;
    for (int each = 0; each < size; ++each) {
      const auto [entry, first] = numbers.try_emplace(host_of[each], static_cast<int>(ranks_of.size()));
      if (first) ranks_of.emplace_back();
      auto& ranks = ranks_of[entry->second];
      host_numbers.push_back(entry->second);
      local_numbers.push_back(static_cast<int>(ranks.size()));
      ranks.push_back(each);
    }
    hosts = static_cast<int>(ranks_of.size());
    host = host_numbers[rank];
    local = local_numbers[rank];
    locals = static_cast<int>(ranks_of[host].size());
    for (const auto& ranks : ranks_of) {
      lanes = std::max(lanes, static_cast<int>(ranks.size()));
      least = least == 0 ? static_cast<int>(ranks.size()) : std::min(least, static_cast<int>(ranks.size()));
    }
    grid = grid_of(hosts);
    if (!socket_of.empty()) group_by_socket(socket_of);
  }

  // The local rank of a host that has a lane.
  int local_with(int lane, int on_host) const { return lane % static_cast<int>(ranks_of[on_host].size()); }
  int rank_with(int lane, int on_host) const { return ranks_of[on_host][local_with(lane, on_host)]; }
  // The rank that a lane is the first one of: on a host with fewer ranks than lanes, some are nobody's.  -1: nobody's.
  int owner_of(int lane, int on_host) const {
    const auto& ranks = ranks_of[on_host];
    return lane < static_cast<int>(ranks.size()) ? ranks[lane] : -1;
  }
  // Calls `act` for the lanes of a local rank of this host.
  template <class Act>
  void for_each_lane(int of_local, const Act& act) const {
    for (int lane = of_local; lane < lanes; lane += locals) act(lane);
  }
  int most_lanes() const { return (lanes + least - 1) / least; }  // of one rank
  bool is_even() const { return lanes == least; }
  size_t longest_row() const { return *std::max_element(grid.begin(), grid.end()); }  // of hosts, in the grid

  Members members;
  int rank, size, threads;
  int hosts = 0, host = 0;    // their number, and this rank's
  int locals = 0, local = 0;  // the ranks of this host, and this rank's number among them
  int lanes = 0, least = 0;   // the most and the fewest ranks of a host
  size_t large = Copy::kLarge;  // bytes of a result that is larger than this rank's caches
  std::vector<std::vector<int>> ranks_of;        // each host's
  std::vector<int> host_numbers, local_numbers;  // of each rank
  std::vector<int> grid;                         // its sizes: their product is the number of hosts
  // Where this host's ranks reduce on each socket first: the local ranks on this rank's socket, and those that have its
  // place on each socket, both with this one.  Else empty.
  std::vector<int> neighbors, counterparts;

 private:
  // A socket has kLeastRanks at least, all have equally many, and none has to stand in for one that its host lacks.
  void group_by_socket(const std::vector<int>& socket_of) {
    constexpr size_t kLeastRanks = 4;
    std::map<int, std::vector<int>> sockets;
    for (int local = 0; local < locals; ++local) sockets[socket_of[ranks_of[host][local]]].push_back(local);
    const auto& own = sockets[socket_of[rank]];
    const auto place = std::find(own.begin(), own.end(), local) - own.begin();
    if (sockets.size() == 1 || sockets.count(-1) || own.size() < kLeastRanks || locals < lanes) return;
    for (const auto& [socket, ranks] : sockets) {
      if (ranks.size() != own.size()) return;
    }
    neighbors = own;
    for (const auto& [socket, ranks] : sockets) counterparts.push_back(ranks[place]);
    std::sort(counterparts.begin(), counterparts.end());
  }

  // A host exchanges messages with all others of its row: the rows are short where the number of hosts allows it.
  static std::vector<int> grid_of(int hosts) {
    constexpr int kLongestRow = 16;
    std::vector<int> sizes;
    while (hosts > kLongestRow) {
      int size = kLongestRow;
      while (size > 1 && hosts % size != 0) --size;
      if (size == 1) break;  // all its factors are larger
      sizes.push_back(size);
      hosts /= size;
    }
    if (hosts > 1 || sizes.empty()) sizes.push_back(hosts);
    return sizes;
  }
};

struct Range {
  size_t begin, end;

  size_t size() const { return end - begin; }
};

// One of `count` parts of a range; all but the last ones have the same size, which is a multiple of `granule`.
inline Range part_of(Range whole, size_t index, size_t count, size_t granule) {
  const size_t even = (whole.size() + count - 1) / count;
  const size_t length = (even + granule - 1) / granule * granule;
  return {std::min(whole.end, whole.begin + index * length), std::min(whole.end, whole.begin + (index + 1) * length)};
}

}  // namespace cpulaunch
