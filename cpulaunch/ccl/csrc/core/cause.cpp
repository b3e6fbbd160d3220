// Makes sentences from causes.  A cause may have come over the network, so none of its values is trusted.

#include "cause.hpp"

#include <cstring>
#include <sstream>

namespace cpulaunch {

namespace {

std::string text_in(const char* field, size_t size) { return {field, strnlen(field, size)}; }

template <size_t size>
std::string text_in(const char (&field)[size]) {
  return text_in(field, size);
}

std::string in_bytes(int64_t count) { return std::to_string(count) + (count == 1 ? " byte" : " bytes"); }

std::string in_seconds(int64_t milliseconds) {
  std::ostringstream text;
  text << milliseconds / 1e3 << " s";
  return text.str();
}

std::string text_of(const cl_call& call) {
  const auto kind = text_in(call.kind);
  auto text = kind;
  if (call.reduction[0]) text += " (" + text_in(call.reduction) + ")";
  if (call.bytes >= 0) text += " of " + in_bytes(call.bytes);
  if (call.type[0]) text += " " + text_in(call.type);
  if (call.compressed) text += ", sent between hosts as bfloat16";
  const auto way = kind == "reduce" || kind == "gather" ? " to rank " : " from rank ";
  if (call.root >= 0) text += way + std::to_string(call.root);
  return text;
}

std::string difference(const cl_cause& cause, const std::string& name) {
  if (!cause.theirs.kind[0]) return name + " calls " + text_in(cause.detail);
  const auto theirs = name + " calls " + text_of(cause.theirs);
  if (cause.parts_differ) return theirs + " in parts of other sizes than this rank";
  const char* when = cause.theirs.sequence < cause.own.sequence ? " as an earlier operation" : " as a later operation";
  return theirs + (cause.theirs.sequence == cause.own.sequence ? "" : when) + ", this rank " + text_of(cause.own);
}

std::string sentence(const cl_cause& cause) {
  const auto host = text_in(cause.host), detail = text_in(cause.detail);
  const auto name = "rank " + std::to_string(cause.rank) + (host.empty() ? "" : " on " + host);
  const auto names = detail.empty() ? cause.rank < 0 ? "a rank" : name : detail;
  switch (static_cast<CauseKind>(cause.kind)) {
    case CauseKind::peer_ended: return name + " has ended";
    case CauseKind::peer_left: return name + " has left the group";
    case CauseKind::connection_lost: return "the connection to " + name + " is lost: " + detail;
    case CauseKind::host_silent:
      return "host " + host + " has given no sign of life for " + in_seconds(cause.milliseconds);
    case CauseKind::store_gone:
      return "the group's store cannot be reached: the process that keeps the store, usually rank 0, has ended";
    case CauseKind::store_silent:
      return "the group's store has not answered for " + in_seconds(cause.milliseconds) +
             ": the host that keeps the store, usually rank 0's, cannot be reached";
    case CauseKind::calls_differ: return difference(cause, name);
    case CauseKind::sizes_differ:
      return name + " sends " + in_bytes(cause.bytes) + " to this rank, which expects " +
             std::to_string(cause.expected);
    case CauseKind::peer_ahead:
      return name + " is ahead: it calls " + detail + " (sequence number " + std::to_string(cause.theirs.sequence) +
             ")";
    case CauseKind::peer_late: return names + " did not call the operation in time, called another one, or ended";
    case CauseKind::peer_awaited: return "this rank waited for " + names;
    case CauseKind::message_missing: return (cause.rank < 0 ? "no rank has " : name + " has not ") + detail;
    case CauseKind::data_missing:
      return "all awaited ranks have called the operation, but not all data arrived in time";
    default: return detail;
  }
}

}  // namespace

}  // namespace cpulaunch

char* cl_cause_text(const cl_cause* cause) { return strdup(cpulaunch::sentence(*cause).c_str()); }
