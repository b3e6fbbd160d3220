// A rank's endpoint in libfabric, with the functions that the network needs.

#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "libfabric.hpp"

namespace cpulaunch {

class FabricEndpoint {
 public:
  static constexpr size_t kLongestMessage = 64 << 20;  // bytes

  // `library`: libfabric's path or name.  `ip`: an address of this host, or "" to leave the choice to the provider.
  // Throws std::runtime_error if no provider offers what is needed.
  FabricEndpoint(const std::string& library, const std::string& ip);
  ~FabricEndpoint();
  FabricEndpoint(const FabricEndpoint&) = delete;
  FabricEndpoint& operator=(const FabricEndpoint&) = delete;

  const std::string& name() const { return name_; }  // by which other ranks reach this endpoint
  // Takes the names of all ranks' endpoints, in the order of the ranks.  Throws std::runtime_error if one can't be
  // used.
  void know(const std::vector<std::string>& names);

  // These return 0, a negative error, or -EAGAIN: try again later.  `context` has libfabric::kContextSize bytes for
  // libfabric.
  ssize_t send(int to, const char* data, size_t bytes, uint64_t tag, void* context);
  ssize_t receive(int from, char* data, size_t bytes, uint64_t tag, void* context);
  // Returns how many operations are done; -EAGAIN if none.  Any other error is about one operation, and failure()
  // describes it.
  ssize_t completions(libfabric::Completion* all, size_t most);
  libfabric::Failure failure();
  std::string text_of(ssize_t error) const { return library_.text_of(error); }
  // Whether data moves only while this endpoint's functions are called.
  bool is_passive() const { return offer_->domain->data_progress == libfabric::kManualProgress; }

 private:
  void open(const std::string& ip);
  void close();

  const libfabric::Library& library_;
  libfabric::Offer* offer_ = nullptr;
  libfabric::Fabric* fabric_ = nullptr;
  libfabric::Domain* domain_ = nullptr;
  libfabric::AddressVector* vector_ = nullptr;
  libfabric::Queue* queue_ = nullptr;
  libfabric::Endpoint* endpoint_ = nullptr;
  std::string name_;
  std::vector<libfabric::Address> addresses_;  // of each rank
};

}  // namespace cpulaunch
