// Makes a group of ranks that are threads of one process.

#pragma once

#include <pthread.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "connector.hpp"
#include "hierarchy.hpp"

namespace cpulaunch {

class Meeting {
 public:
  using Addresses = std::vector<Connector::Address>;

  // `host_of` has the number of each rank's host.  `results` is how many results the ranks will compare.
  explicit Meeting(std::vector<int> host_of, size_t results = 0);
  ~Meeting();
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  int size() const { return static_cast<int>(host_of.size()); }
  // Called by each rank in its own thread: returns when all have come.
  std::shared_ptr<Hierarchy> join(int rank);
  // Called by each rank at the end, unless something has failed.
  void leave(Hierarchy& hierarchy) const;
  // Returns when all ranks have called it.
  void wait_for_all() { pthread_barrier_wait(&barrier_); }
  // Throws std::runtime_error if another rank's result has a different digest.
  void compare(size_t result, uint64_t digest);

  const std::vector<int> host_of;
  std::vector<int> socket_of;  // empty: unknown
  int threads = 1;             // of each rank
  // Called when all ranks listen, and before any of them connects.
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

// From now on, the kernel's buffers of each connection hold so few bytes that most of a message waits until the
// receiver has given memory for it.
void narrow_connections();
// What a thread, and so a rank, has made the kernel and the heap do.  With a sanitizer, nothing is counted.
struct Counts {
  uint64_t sends = 0, sent_bytes = 0;
  uint64_t receives = 0, received_bytes = 0, vain = 0;  // calls that received something, and those that didn't
  uint64_t polls = 0;                                   // of many connections at once
  uint64_t allocations = 0, large_allocations = 0;      // the latter of at least kLargeAllocation bytes
  static constexpr size_t kLargeAllocation = 64 << 10;

  Counts operator-(const Counts& before) const;
};
Counts counts_of_this_thread();
// From now on, groups use libfabric between hosts: the library in LIBFABRIC, with the provider in FI_PROVIDER.
void use_libfabric();

}  // namespace cpulaunch
