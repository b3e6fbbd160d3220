#include "meeting.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iterator>
#include <stdexcept>

#include "network_fabric.hpp"
#include "network_striped.hpp"

namespace {

// ThreadSanitizer identifies memory by its address, so all ranks of a host need the same mapping.
#if defined(__SANITIZE_THREAD__)
constexpr bool kMapsOnce = true;
#else
constexpr bool kMapsOnce = false;
#endif

constexpr int kNarrow = 16 << 10;  // bytes
std::atomic<bool> narrow{false}, over_libfabric{false}, shared{false};
std::atomic<size_t> connections{1};
thread_local cpulaunch::Counts counts;

}  // namespace

// Replaces the C library's function.
extern "C" int socket(int domain, int type, int protocol) noexcept {
  const int descriptor = static_cast<int>(syscall(SYS_socket, domain, type, protocol));
  if (narrow) {
    setsockopt(descriptor, SOL_SOCKET, SO_SNDBUF, &kNarrow, sizeof(kNarrow));
    setsockopt(descriptor, SOL_SOCKET, SO_RCVBUF, &kNarrow, sizeof(kNarrow));  // connections inherit a listener's
  }
  return descriptor;
}

// Sanitizers need their own versions, which tell them what threads learn from each other.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
extern "C" ssize_t sendmsg(int descriptor, const msghdr* message, int flags) {
  const auto bytes = syscall(SYS_sendmsg, descriptor, message, flags);
  ++(bytes > 0 ? counts.sends : counts.vain_sends);
  if (bytes > 0) counts.sent_bytes += static_cast<uint64_t>(bytes);
  return bytes;
}
extern "C" ssize_t recvmsg(int descriptor, msghdr* message, int flags) {
  const auto bytes = syscall(SYS_recvmsg, descriptor, message, flags);
  ++(bytes > 0 ? counts.receives : counts.vain);
  if (bytes > 0) counts.received_bytes += static_cast<uint64_t>(bytes);
  return bytes;
}
extern "C" int accept4(int descriptor, sockaddr* address, socklen_t* length, int flags) {
  const auto accepted = static_cast<int>(syscall(SYS_accept4, descriptor, address, length, flags));
  ++(accepted >= 0 ? counts.receives : counts.vain);
  return accepted;
}
extern "C" int epoll_wait(int descriptor, epoll_event* events, int most, int timeout) {
  ++counts.polls;
  return static_cast<int>(syscall(SYS_epoll_pwait, descriptor, events, most, timeout, nullptr, 0));
}

extern "C" void* __libc_malloc(size_t bytes);
extern "C" void* malloc(size_t bytes) {  // also called by operator new
  ++counts.allocations;
  counts.large_allocations += bytes >= cpulaunch::Counts::kLargeAllocation;
  return __libc_malloc(bytes);
}
#endif

namespace cpulaunch {

Counts Counts::operator-(const Counts& before) const {
  Counts since = *this;
  since.sends -= before.sends, since.sent_bytes -= before.sent_bytes, since.vain_sends -= before.vain_sends;
  since.receives -= before.receives, since.received_bytes -= before.received_bytes, since.vain -= before.vain;
  since.polls -= before.polls;
  since.allocations -= before.allocations, since.large_allocations -= before.large_allocations;
  return since;
}

Counts counts_of_this_thread() { return counts; }
size_t open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}
void narrow_connections() { narrow = true; }
void use_libfabric() { over_libfabric = true; }
void use_connections(size_t count) { connections = count; }
void share_connections() { shared = true; }
size_t connections_between_ranks() { return connections; }

Meeting::Meeting(std::vector<int> hosts, size_t results)
    : host_of(std::move(hosts)),
      offers_(host_of.size()),
      mapped_(host_of.size()),
      listeners_(host_of.size()),
      addresses_(host_of.size()),
      names_(host_of.size()),
      digests_(results) {
  pthread_barrier_init(&barrier_, nullptr, static_cast<unsigned>(host_of.size()));
}

Meeting::~Meeting() { pthread_barrier_destroy(&barrier_); }

std::shared_ptr<Hierarchy> Meeting::join(int rank, std::shared_ptr<PointToPoint>* messages) {
  Layout layout(host_of, rank, socket_of, {}, threads);
  layout.shares_connections = layout.shares_connections || shared;
  const bool connects = layout.hosts > 1;
  if (connects) {
    listeners_[rank] = Connector::listen("127.0.0.1");
    addresses_[rank] = {"127.0.0.1", listeners_[rank].port};
  }
  std::unique_ptr<FabricEndpoint> endpoint;
  if (connects && over_libfabric) {
    const std::string provider = std::getenv("FI_PROVIDER");
    endpoint = std::make_unique<FabricEndpoint>(std::getenv("LIBFABRIC"), provider == "tcp" ? "127.0.0.1" : "");
    names_[rank] = endpoint->name();
  }
  auto slots = share(layout);
  if (rank == 0) before_connecting(addresses_);
  wait_for_all();
  std::shared_ptr<Connector> connector;
  std::unique_ptr<Network> network;
  if (connects) {
    connector =
        std::make_shared<Connector>(rank, listeners_[rank], addresses_, std::string(kLeastKey, 'x'), connections + 1);
    if (endpoint) {
      endpoint->know(names_);
      network = std::make_unique<FabricNetwork>(layout, connector, std::move(endpoint));
    } else {
      network = make_tcp_network(layout, connector, connections);
    }
  }
  if (messages) *messages = std::make_shared<PointToPoint>(layout, slots, connector);
  auto hierarchy = std::make_shared<Hierarchy>(layout, std::move(slots), std::move(network));
  hierarchy->meet();
  wait_for_all();  // no rank calls an operation before all are connected
  return hierarchy;
}

void Meeting::leave(Hierarchy& hierarchy) const {
  while (std::uncaught_exceptions() == 0 && !hierarchy.leave_network()) std::this_thread::yield();
}

std::shared_ptr<SharedSlots> Meeting::share(const Layout& layout) {
  const SharedSlots::Shape shape(layout);
  const bool first = layout.local == 0;
  const int first_rank = layout.ranks_of[layout.host][0];
  auto& offer = offers_[first_rank];
  auto& mapped = mapped_[first_rank];
  if (first && layout.locals > 1) {
    offer = {getpid(), SharedSlots::offer(layout.locals, shape)};
    if (kMapsOnce) mapped = SharedSlots::map(offer, layout.locals, shape);
  }
  wait_for_all();
  auto slots = kMapsOnce ? mapped : SharedSlots::map(offer, layout.locals, shape);
  if (slots) slots->introduce(layout.local);
  wait_for_all();
  if (first && offer.descriptor >= 0) close(offer.descriptor);
  if (first) mapped.reset();
  return slots;
}

void Meeting::compare(size_t result, uint64_t digest) {
  uint64_t other = 0;
  // Relaxed, so that only the transport orders the ranks' accesses to memory.
  if (!digests_[result].compare_exchange_strong(other, digest, std::memory_order_relaxed) && other != digest) {
    throw std::runtime_error("another rank has other bits");
  }
}

}  // namespace cpulaunch
