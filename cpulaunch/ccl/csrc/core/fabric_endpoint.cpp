#include "fabric_endpoint.hpp"

#include <new>
#include <stdexcept>

#include "forked.hpp"

namespace cpulaunch {

FabricEndpoint::FabricEndpoint(const std::string& library, const std::string& ip)
    : library_(libfabric::Library::load(library)) {
  try {
    open(ip);
  } catch (...) {
    close();
    throw;
  }
}

FabricEndpoint::~FabricEndpoint() {
  if (!is_forked()) close();  // in a forked process, the connections belong to the parent
}

void FabricEndpoint::open(const std::string& ip) {
  const auto check = [&](ssize_t error, const char* what) {
    if (error) throw std::runtime_error(std::string("libfabric has no ") + what + ": " + text_of(error));
  };
  auto* wishes = library_.copy(nullptr);
  if (!wishes) throw std::bad_alloc();
  wishes->capabilities = libfabric::kTagged | libfabric::kDirectedReceive;
  wishes->mode = libfabric::kContext | libfabric::kContext2;
  wishes->endpoint->type = libfabric::kReliableDatagrams;
  wishes->endpoint->longest_message = kLongestMessage;
  wishes->domain->threading = libfabric::kThreadsOfDomain;
  wishes->domain->control_progress = wishes->domain->data_progress = libfabric::kManualProgress;
  wishes->domain->resource_management = libfabric::kQueuesDontOverflow;
  wishes->domain->memory_mode = 0;  // memory needn't be registered
  wishes->send->message_order = wishes->receive->message_order = libfabric::kSendsInOrder;
  const auto error = library_.ask(libfabric::kVersion, ip.empty() ? nullptr : ip.c_str(), nullptr,
                                  ip.empty() ? 0 : libfabric::kSource, wishes, &offer_);
  library_.free(wishes);
  check(error, "provider for this host");
  check(library_.open(offer_->fabric, &fabric_, nullptr), "fabric");
  check(fabric_->functions->domain(&fabric_->object, offer_, &domain_, nullptr), "domain");
  libfabric::AddressVectorAttributes vector{};
  vector.type = libfabric::kAddressTable;
  check(domain_->functions->address_vector(domain_, &vector, &vector_, nullptr), "address vector");
  libfabric::QueueAttributes queue{};
  queue.format = libfabric::kMessageEntries;
  check(domain_->functions->queue(domain_, &queue, &queue_, nullptr), "completion queue");
  check(domain_->functions->endpoint(domain_, offer_, &endpoint_, nullptr), "endpoint");
  auto& object = endpoint_->object;
  check(object.functions->bind(&object, &vector_->object, 0), "use for the address vector");
  check(object.functions->bind(&object, &queue_->object, libfabric::kSend | libfabric::kReceive), "use for the queue");
  check(object.functions->control(&object, libfabric::kEnable, nullptr), "working endpoint");
  char name[256];
  size_t size = sizeof(name);
  check(endpoint_->connection->get_name(&object, name, &size), "name of the endpoint");
  name_.assign(name, size);
}

void FabricEndpoint::close() {
  const auto end = [](auto* each) {
    if (each) each->object.functions->close(&each->object);
  };
  end(endpoint_), end(queue_), end(vector_), end(domain_), end(fabric_);
  if (offer_) library_.free(offer_);
}

void FabricEndpoint::know(const std::vector<std::string>& names) {
  for (const auto& name : names) {
    libfabric::Address address = 0;
    if (!name.empty() && vector_->functions->insert(vector_, name.data(), 1, &address, 0, nullptr) != 1) {
      throw std::runtime_error("libfabric can't use another rank's address");
    }
    addresses_.push_back(address);
  }
}

ssize_t FabricEndpoint::send(int to, const char* data, size_t bytes, uint64_t tag, void* context) {
  return endpoint_->tagged->send(endpoint_, data, bytes, nullptr, addresses_[to], tag, context);
}

ssize_t FabricEndpoint::receive(int from, char* data, size_t bytes, uint64_t tag, void* context) {
  return endpoint_->tagged->receive(endpoint_, data, bytes, nullptr, addresses_[from], tag, 0, context);
}

ssize_t FabricEndpoint::completions(libfabric::Completion* all, size_t most) {
  return queue_->functions->read(queue_, all, most);
}

libfabric::Failure FabricEndpoint::failure() {
  libfabric::Failure failure{};
  queue_->functions->read_failure(queue_, &failure, 0);
  return failure;
}

}  // namespace cpulaunch
