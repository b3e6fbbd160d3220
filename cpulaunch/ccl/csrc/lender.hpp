// Sends memory over a socket without copying it: the packets refer to its pages.
//
// So the memory must not change until the receiver has read it.  The kernel doesn't tell when that is: between hosts
// on one machine (containers, network namespaces), what waits at the receiver refers to the sender's pages, too.  Let
// the receiver say so.
//
// vmsplice(2) refers to pages from a pipe, and splice(2) moves these references to the socket.  MSG_ZEROCOPY needs no
// pipe, but over virtual Ethernet the kernel copies what is sent that way after all.

#pragma once

#include <cstddef>

namespace cpulaunch {

class Lender {
 public:
  Lender() = default;
  Lender(const Lender&) = delete;
  Lender& operator=(const Lender&) = delete;
  ~Lender();

  // Whether memory can be lent: the pipe takes three descriptors, and sandboxes may forbid the calls.
  bool is_usable();
  // As sendmsg(2) of a socket that doesn't block: returns how many bytes it has taken, or -1 with errno.  Returns 0
  // where this memory can't be lent.
  ptrdiff_t send(int socket, const char* data, size_t bytes);

 private:
  bool hold(const char* data, size_t bytes);
  void close();

  bool tried_ = false;
  int pipe_[2] = {-1, -1}, null_ = -1;
  const char* held_ = nullptr;  // what the pipe refers to
  size_t bytes_held_ = 0;
};

}  // namespace cpulaunch
