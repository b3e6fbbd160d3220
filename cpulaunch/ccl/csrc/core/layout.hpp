// Which ranks of a group share a host, and which share a socket.

#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "copy.hpp"
#include "members.hpp"

namespace cpulaunch {

// Hosts are numbered in the order of their first ranks.  The ranks of a host are its local ranks, and are numbered in
// their order in the group.  Between hosts, data travels in lanes, of which there are as many as the fullest host has
// ranks.  On each host, one local rank sends and receives the data of a lane.
struct Layout {
  // `host_of` has a number that identifies the host of each rank.  `socket_of` has the socket of each rank, or -1; it
  // is empty if the sockets are unknown.  `members` names the ranks in messages.  Each rank computes with at least
  // `threads` threads.
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
    shares_connections = hosts > kMostApart;
    grid = grid_of(hosts);
    if (!socket_of.empty()) group_by_socket(socket_of);
  }

  // The local rank of a host that handles a lane.
  int local_with(int lane, int on_host) const { return lane % static_cast<int>(ranks_of[on_host].size()); }
  int rank_with(int lane, int on_host) const { return ranks_of[on_host][local_with(lane, on_host)]; }
  // The rank for which this is the first lane; -1 if there is none, because the host has fewer ranks than there are
  // lanes.
  int owner_of(int lane, int on_host) const {
    const auto& ranks = ranks_of[on_host];
    return lane < static_cast<int>(ranks.size()) ? ranks[lane] : -1;
  }
  // Calls `act` for the lanes of a local rank of this host.
  template <class Act>
  void for_each_lane(int of_local, const Act& act) const {
    for (int lane = of_local; lane < lanes; lane += locals) act(lane);
  }
  int most_lanes() const { return (lanes + least - 1) / least; }  // the most lanes that one rank handles
  bool is_even() const { return lanes == least; }
  size_t longest_row() const { return *std::max_element(grid.begin(), grid.end()); }  // of the grid, in hosts
  int hosts_in_grid() const { return product(grid); }
  int guests_of_row(int row) const {  // a row of the first dimension
    const int rows = hosts_in_grid() / grid[0], guests = hosts - hosts_in_grid();
    return (guests - row + rows - 1) / rows;
  }

  Members members;
  int rank, size, threads;
  int hosts = 0, host = 0;    // how many hosts, and the number of this rank's
  int locals = 0, local = 0;  // how many ranks on this host, and this rank's number among them
  int lanes = 0, least = 0;   // the most and the fewest ranks of a host
  size_t large = Copy::kLarge;  // results of this many bytes are larger than this rank's caches
  // Whether ranks of different hosts have one connection for both directions, instead of one for each (link.hpp).
  bool shares_connections = false;
  std::vector<std::vector<int>> ranks_of;        // each host's
  std::vector<int> host_numbers, local_numbers;  // of each rank
  // The sizes of the grid's dimensions.  The last hosts may be outside of the grid.  They are guests of the rows of its
  // first dimension, in turn.
  std::vector<int> grid;
  static constexpr size_t kMostDimensions = 14;  // enough for 2^31 hosts, because no factor is less than 5
  // Empty unless the ranks of this host reduce on each socket first.  Then `neighbors` are the local ranks on this
  // rank's socket, and `counterparts` those in its place on each socket.  Both include this rank.
  std::vector<int> neighbors, counterparts;

 private:
  static constexpr int kMostApart = 8;  // in groups of more hosts, ranks share connections; chosen, not measured

  // Reduces by socket only if each socket has kLeastRanks or more, all sockets have equally many, and each local rank
  // handles just one lane.
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

  static int product(const std::vector<int>& sizes) {
    return std::accumulate(sizes.begin(), sizes.end(), 1, std::multiplies<int>());
  }

  // A host exchanges messages with all others in its row, so rows are short.  If the number of hosts has a large prime
  // factor, a few hosts are left out of the grid.
  static std::vector<int> grid_of(int hosts) {
    constexpr int kLongestRow = 16;
    if (hosts == kLongestRow + 1) return {hosts};  // a grid of 16 hosts and a guest would save no message
    const auto factor_of = [](int number) {
      int factor = kLongestRow;
      while (number % factor != 0) --factor;
      return factor;
    };
    for (int in_grid = hosts;; --in_grid) {
      std::vector<int> sizes;
      int rest = in_grid;
      for (int size; rest > kLongestRow && (size = factor_of(rest)) > 1; rest /= size) sizes.push_back(size);
      if (rest > kLongestRow) continue;
      if (rest > 1 || sizes.empty()) sizes.push_back(rest);
      return sizes;
    }
  }
};

struct Range {
  size_t begin, end;

  size_t size() const { return end - begin; }
};

// Returns one of `count` parts of a range.  They have the same size, a multiple of `granule`, except for the last ones,
// which may be smaller or empty.
inline Range part_of(Range whole, size_t index, size_t count, size_t granule) {
  const size_t even = (whole.size() + count - 1) / count;
  const size_t length = (even + granule - 1) / granule * granule;
  return {std::min(whole.end, whole.begin + index * length), std::min(whole.end, whole.begin + (index + 1) * length)};
}

}  // namespace cpulaunch
