// oneCCL's communicators: how ranks connect, and how operations on memory start.

#pragma once

#include <functional>
#include <memory>
#include <string>

#include <oneapi/ccl.hpp>

#include "collective.hpp"
#include "interface.h"
#include "transfer.hpp"

namespace cpulaunch {

// Connects the ranks through `store`.  Throws std::exception if they don't meet within oneCCL's time limit.
std::unique_ptr<ccl::communicator> connect_oneccl(const cl_store& store, int rank, int size);
// `in_flight`: whether any of the communicator's operations are still in flight.
void disconnect_oneccl(std::unique_ptr<ccl::communicator> communicator, bool in_flight);
// Starts the oneCCL operation that `call` calls.
std::unique_ptr<Transfer> start_oneccl(const std::function<ccl::event()>& call);
// Returns a transfer that runs `action` once `transfer` is done.
std::unique_ptr<Transfer> then(std::unique_ptr<Transfer> transfer, std::function<void()> action);

ccl::datatype datatype_of(NumberType type);
// For an average, returns the sum.  Throws for bitwise reductions, which oneCCL lacks.
ccl::reduction reduction_of(NumberType type, Reduction reduction);

// Parts in one contiguous buffer, as oneCCL needs them.  Parts that are already adjacent are used in place.
class SideBySide {
 public:
  explicit SideBySide(Parts parts);

  // Copy the parts to the buffer, and the buffer to the parts.
  void join() const;
  void split() const;

  ccl::vector_class<size_t> sizes;  // bytes
  char* data = nullptr;
  size_t bytes = 0;  // of all

 private:
  Parts parts_;
  std::unique_ptr<char[]> joined_;
};

}  // namespace cpulaunch
