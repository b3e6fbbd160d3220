// Why an operation or a group has failed, as data.  The text of an error is made from it, and nothing reads that text:
// a rank's report carries the cause to the launcher (cpulaunch/cause.py has the same names).

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "interface.h"
#include "members.hpp"

namespace cpulaunch {

enum class CauseKind : uint32_t {
  none,
  peer_ended,        // the process of a rank on this host
  peer_left,         // a rank has destroyed the group
  connection_lost,   // `detail`: what the system says
  host_silent,       // for `milliseconds`
  store_gone,        // the process that serves it has ended
  store_silent,      // for `milliseconds`
  calls_differ,      // `theirs` and `own`; or `detail`: what the rank says that it calls
  sizes_differ,      // the rank has sent `bytes`, and `expected` were expected
  peer_ahead,        // `detail` and `theirs.sequence`: what the rank calls
  peer_late,         // `detail`: names of several ranks
  peer_awaited,      // nobody could be asked why; `detail`: names of several ranks
  message_missing,   // `detail`: which one
  data_missing,      // all have called the operation
  callback_failed,   // what is done with the results has failed
  signal_handler,    // has raised an exception
  aborted,           // by the program
  transport_failed,  // for a reason of another library
};

constexpr const char* kCauseNames[] = {
    "none",       "peer_ended",   "peer_left",       "connection_lost", "host_silent",     "store_gone",
    "store_silent", "calls_differ", "sizes_differ",  "peer_ahead",      "peer_late",       "peer_awaited",
    "message_missing", "data_missing", "callback_failed", "signal_handler", "aborted",     "transport_failed",
};

// As much of a text as there is room for.
template <size_t size>
void write_text(char (&field)[size], const std::string& text) {
  const auto length = text.copy(field, size - 1);
  field[length] = 0;
}

struct Cause : cl_cause {
  explicit Cause(CauseKind kind = CauseKind::none) : cl_cause{} {
    this->kind = static_cast<uint32_t>(kind);
    rank = finder = theirs.root = own.root = -1;
    theirs.bytes = own.bytes = -1;
  }
  explicit Cause(const cl_cause& c) : cl_cause(c) {}
  // About this rank of the group.
  Cause(CauseKind kind, const Members& members, int about) : Cause(kind) {
    rank = members.number_of(about);
    write_text(host, members.host_of(about));
  }

  Cause with(const std::string& what) const {
    auto copy = *this;
    write_text(copy.detail, what);
    return copy;
  }
  bool is(CauseKind other) const { return kind == static_cast<uint32_t>(other); }
  bool empty() const { return is(CauseKind::none); }
  // "" where there is none.
  std::string text() const;
};

static_assert(sizeof(Cause) == sizeof(cl_cause));

}  // namespace cpulaunch
