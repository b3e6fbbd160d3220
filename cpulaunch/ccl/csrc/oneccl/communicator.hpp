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

// Connects the ranks through `store`.  Throws std::exception when they don't meet
// within oneCCL's own time.
std::unique_ptr<ccl::communicator> connect_oneccl(const cl_store& store, int rank, int size);
// `in_flight`: some of its operations are.
void disconnect_oneccl(std::unique_ptr<ccl::communicator> communicator, bool in_flight);
// Starts an operation of oneCCL's, which `call` calls.
std::unique_ptr<Transfer> start_oneccl(const std::function<ccl::event()>& call);
// `transfer`, and `action` once it is done.
std::unique_ptr<Transfer> then(std::unique_ptr<Transfer> transfer, std::function<void()> action);

ccl::datatype datatype_of(NumberType type);
// Throws for the bitwise ones, which oneCCL lacks.  That of an average is a sum.
ccl::reduction reduction_of(NumberType type, Reduction reduction);

// Parts side by side, as oneCCL takes them: the parts themselves where they lie so.
class SideBySide {
 public:
  explicit SideBySide(Parts parts);

  // From the parts, and back to them.
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
