// Makes a group whose ranks are threads of one process.

#pragma once

#include <pthread.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "connector.hpp"
#include "hierarchy.hpp"
#include "point_to_point.hpp"

namespace cpulaunch {

class Meeting {
 public:
  using Addresses = std::vector<Connector::Address>;

  // `host_of` has the number of each rank's host.  The ranks will compare this many `results`.
  explicit Meeting(std::vector<int> host_of, size_t results = 0);
  ~Meeting();
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  int size() const { return static_cast<int>(host_of.size()); }
  // Called by each rank in a thread of its own.  Returns when all ranks have called it.
  // Stores what carries the rank's messages in `messages`, if that is not null.
  std::shared_ptr<Hierarchy> join(int rank, std::shared_ptr<PointToPoint>* messages = nullptr);
  // Called by each rank at its end, unless something has failed.
  void leave(Hierarchy& hierarchy) const;
  // Returns when all ranks have called it.
  void wait_for_all() { pthread_barrier_wait(&barrier_); }
  // Throws std::runtime_error if another rank has passed another digest for this result.
  void compare(size_t result, uint64_t digest);

  const std::vector<int> host_of;
  std::vector<int> socket_of;  // empty: unknown
  int threads = 1;             // of each rank
  // Called once all ranks listen, before any of them connects.
  std::function<void(Addresses&)> before_connecting = [](Addresses&) {};

 private:
  std::shared_ptr<SharedSlots> share(const Layout& layout);

  std::vector<ShmOffer> offers_;  // of each host's first rank
  std::vector<std::shared_ptr<SharedSlots>> mapped_;
  std::vector<Connector::Listener> listeners_;
  Addresses addresses_;
  std::vector<std::string> names_;  // of each rank's endpoint
  std::vector<std::atomic<uint64_t>> digests_;
  pthread_barrier_t barrier_;
};

// From now on, connections have such small buffers in the kernel that most messages need the receiver's memory.
void narrow_connections();
// System calls and allocations of a thread.  With a sanitizer, nothing is counted.
struct Counts {
  uint64_t sends = 0, sent_bytes = 0, vain_sends = 0;  // vain: without a result
  uint64_t receives = 0, received_bytes = 0, vain = 0;
  uint64_t polls = 0;                                   // of many connections at once
  uint64_t allocations = 0, large_allocations = 0;      // large: of at least kLargeAllocation
  static constexpr size_t kLargeAllocation = 64 << 10;

  Counts operator-(const Counts& before) const;
};
Counts counts_of_this_thread();
size_t open_descriptors();  // of this process
// From now on, libfabric connects hosts: the library LIBFABRIC with the provider FI_PROVIDER, from the environment.
void use_libfabric();
// From now on, two ranks of different hosts have this many connections for collectives.
void use_connections(size_t count);
// From now on, each of these connections serves both directions, whatever the number of hosts.
void share_connections();
size_t connections_between_ranks();

}  // namespace cpulaunch
