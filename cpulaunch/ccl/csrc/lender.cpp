#include "lender.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>

namespace cpulaunch {

namespace {

// Bytes that a pipe refers to.  With the 64 KB of a new pipe, lending takes longer than copying.  The kernel lets a
// user without privileges have 256 pipes of this size.
constexpr int kPipe = 256 << 10;

// As splice(2), but a connection that was closed at the other end raises no SIGPIPE: splice() can't be told, as send(2)
// can.
ptrdiff_t splice_quietly(int from, int socket, size_t bytes, unsigned flags) {
  sigset_t signal, former;
  sigemptyset(&signal);
  sigaddset(&signal, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &signal, &former);
  const auto moved = splice(from, nullptr, socket, nullptr, bytes, flags);
  const int error = errno;
  // It is raised, too, where a part has been moved.  Where the caller hadn't blocked it, none was pending before.
  const timespec at_once{};
  const bool all = moved == static_cast<ptrdiff_t>(bytes);
  if (!all && !sigismember(&former, SIGPIPE)) sigtimedwait(&signal, nullptr, &at_once);
  pthread_sigmask(SIG_SETMASK, &former, nullptr);
  errno = error;
  return moved;
}

}  // namespace

Lender::~Lender() { close(); }

void Lender::close() {
  for (int* each : {&pipe_[0], &pipe_[1], &null_}) {
    if (*each >= 0) ::close(*each);
    *each = -1;
  }
}

bool Lender::is_usable() {
  if (!tried_) {
    tried_ = true;
    null_ = open("/dev/null", O_WRONLY | O_CLOEXEC);
    if (null_ < 0 || pipe2(pipe_, O_CLOEXEC | O_NONBLOCK) != 0 || fcntl(pipe_[1], F_SETPIPE_SZ, kPipe) < kPipe) close();
  }
  return pipe_[0] >= 0;
}

ptrdiff_t Lender::send(int socket, const char* data, size_t bytes) {
  if (!is_usable()) return 0;
  const bool holds = data == held_ && bytes >= bytes_held_;
  if (!holds && !hold(data, bytes)) return 0;
  const unsigned more = bytes_held_ < bytes ? SPLICE_F_MORE : 0;
  const auto taken = splice_quietly(pipe_[0], socket, bytes_held_, SPLICE_F_NONBLOCK | more);
  if (taken > 0) {
    bytes_held_ -= taken;
    held_ = bytes_held_ ? held_ + taken : nullptr;
  }
  return taken;
}

// Has the pipe refer to the beginning of this memory, instead of what the last socket has not taken.
bool Lender::hold(const char* data, size_t bytes) {
  while (bytes_held_ > 0) {
    const auto dropped = splice(pipe_[0], nullptr, null_, nullptr, bytes_held_, SPLICE_F_NONBLOCK);
    if (dropped <= 0) break;
    bytes_held_ -= dropped;
  }
  iovec memory{const_cast<char*>(data), std::min<size_t>(bytes, kPipe)};
  const auto piped = bytes_held_ ? -1 : vmsplice(pipe_[1], &memory, 1, SPLICE_F_NONBLOCK);
  if (piped <= 0) {
    close();
    return false;
  }
  held_ = data;
  bytes_held_ = piped;
  return true;
}

}  // namespace cpulaunch
