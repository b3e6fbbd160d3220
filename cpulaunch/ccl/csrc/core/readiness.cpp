#include "readiness.hpp"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "connector.hpp"

namespace cpulaunch {

namespace {

// With up to this many connections, reading from each takes no longer than asking the kernel first.
constexpr size_t kFew = 8;
constexpr int kAtOnce = 64;  // the most connections that one system call reports

}  // namespace

Readiness::~Readiness() {
  if (descriptor_ >= 0) close(descriptor_);
}

void Readiness::add(int descriptor, int rank) {
  if (++count_ <= kFew) {
    few_.emplace_back(descriptor, rank);
    return;
  }
  if (descriptor_ < 0) {
    descriptor_ = epoll_create1(EPOLL_CLOEXEC);
    if (descriptor_ < 0) throw ConnectionLost(std::string("this rank can't watch it: ") + std::strerror(errno));
    for (const auto& [each, its_rank] : few_) register_one(each, its_rank);
    few_.clear();
  }
  register_one(descriptor, rank);
}

void Readiness::register_one(int descriptor, int rank) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u32 = static_cast<uint32_t>(rank);
  if (epoll_ctl(descriptor_, EPOLL_CTL_ADD, descriptor, &event) != 0) {
    throw ConnectionLost(std::string("this rank can't watch it: ") + std::strerror(errno));
  }
}

const std::vector<char>& Readiness::ask() {
  std::fill(ready_.begin(), ready_.end(), false);
  epoll_event events[kAtOnce];
  // If more than kAtOnce are ready, the next call reports others: the kernel takes them in turn.
  const int found = epoll_wait(descriptor_, events, kAtOnce, 0);
  for (int i = 0; i < found; ++i) ready_.at(events[i].data.u32) = true;
  return ready_;
}

}  // namespace cpulaunch
