// Why an operation or a group has failed, as data.  Errors get their text from it, and no program parses that text: a
// rank's report carries the cause itself to the launcher (cpulaunch/cause.py has the same names).

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
  connection_lost,   // `detail`: the system's error
  host_silent,       // for `milliseconds`
  store_gone,        // the process that serves it has ended
  store_silent,      // for `milliseconds`
  calls_differ,      // `theirs` and `own`; or `detail`: the rank's own description of its call
  sizes_differ,      // the rank has sent `bytes`, but this rank expects `expected`
  peer_ahead,        // `detail` and `theirs.sequence`: the rank's call
  peer_late,         // `detail`: the names, if there are several ranks
  peer_awaited,      // the reason of its delay is unknown; `detail`: the names, if there are several ranks
  message_missing,   // `detail`: which message
  data_missing,      // although all ranks have called the operation
  callback_failed,   // an action on the operation's results has failed
  signal_handler,    // a signal handler has raised an exception
  aborted,           // by the program
  transport_failed,  // the exception has the text of the transport's error
};

constexpr const char* kCauseNames[] = {
    "none",       "peer_ended",   "peer_left",       "connection_lost", "host_silent",     "store_gone",
    "store_silent", "calls_differ", "sizes_differ",  "peer_ahead",      "peer_late",       "peer_awaited",
    "message_missing", "data_missing", "callback_failed", "signal_handler", "aborted",     "transport_failed",
};

// Writes as much of a text as fits.
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
  // About the rank `about` of the group.
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
  // The sentence for the cause; "" if there is none.
  std::string text() const;
};

static_assert(sizeof(Cause) == sizeof(cl_cause));

}  // namespace cpulaunch
