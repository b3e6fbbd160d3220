#include "network_messages.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>
#include <tuple>

namespace cpulaunch {

namespace {

// After this many calls of progress() that have moved nothing, the network looks for unasked messages.  A thread that
// sleeps between its calls makes them in about 0.1 s.
constexpr unsigned kIdleCallsPerCheck = 1000;

}  // namespace

void MessageNetwork::enter(const Signature& signature) {
  current_ = signature;
  if (signature.root >= 0) entered_ = Clock::now();
}

void MessageNetwork::receive(int from, const Tag& tag, const Signature& signature, char* data, size_t bytes,
                             int& pending) {
  expect(from, {{tag, signature, bytes}, data, bytes, &pending});
}

void MessageNetwork::expect(int from, const Expected& message) {
  ++*message.pending;
  auto& peer = incoming_[from];
  if (peer.expected.empty()) receiving_.push_back(from);
  peer.expected.push_back(message);
}

void MessageNetwork::check_when_idle(size_t moved) {
  idle_calls_ = moved ? 0 : idle_calls_ + 1;
  if (idle_calls_ == kIdleCallsPerCheck || !lost_.empty()) {
    idle_calls_ = 0;
    check_unasked();
  }
}

// Counts the earliest messages only.  The senders of later ones may themselves be waiting for an earlier message.
std::vector<int> MessageNetwork::awaited_by(const std::vector<const MessageNetwork*>& networks) {
  std::map<std::tuple<uint64_t, uint32_t, uint16_t>, std::set<int>> expected;
  std::set<int> ranks;
  for (const auto* network : networks) {
    for (const int rank : network->sending()) ranks.insert(rank);
    for (const int rank : network->receiving_) {
      for (const auto& each : network->incoming_[rank].expected) {
        const auto& tag = each.header.tag;
        expected[{tag.operation, tag.piece, tag.phase}].insert(rank);
      }
    }
  }
  if (!expected.empty()) ranks = expected.begin()->second;
  return {ranks.begin(), ranks.end()};
}

const Cause& MessageNetwork::lost() {
  for (size_t i = 0; i < receiving_.size() && lost_.empty(); ++i) {
    const int from = receiving_[i];
    try {
      ask(from);
      const auto why = why_lost(from);
      if (!why.empty()) lose(from, why);
    } catch (const ConnectionLost& error) {
      lose(from, error.what());
    }
  }
  return lost_;
}

// Asks once for each operation.
void MessageNetwork::ask(int rank) {
  auto& peer = incoming_[rank];
  if (peer.expected.empty()) return;
  const auto& awaited = peer.expected.front().header;
  if (peer.asked == awaited.tag.operation) return;
  const Tag tag{awaited.tag.operation, 0, kQuestion};
  send_question(rank, {{tag, awaited.signature, /*bytes=*/0}, nullptr, /*bytes=*/0, &questions_});
}

// Returns whether the header is a question about this rank's operation, or about an earlier one.  Such a question needs
// no reply: its sender waits for a message that is still on its way, or for another rank.  Throws Mismatch if this rank
// calls something else.
bool MessageNetwork::answer(int from) {
  auto& peer = incoming_[from];
  const auto& signature = peer.header.signature;
  if (peer.header.tag.phase != kQuestion || !current_ || signature.sequence > current_->sequence) return false;
  if (signature.sequence == current_->sequence && signature != *current_) {
    throw signature.mismatch(members_, from, *current_);
  }
  peer.in_header = false;
  return true;
}

void MessageNetwork::lose(int peer, const std::string& what) {
  if (lost_.empty()) lost_ = Cause(CauseKind::connection_lost, members_, peer).with(what);
}

bool MessageNetwork::read_header(int from) {
  auto& peer = incoming_[from];
  do {
    if (!peer.in_header) peer.in_header = take_header(from);
  } while (peer.in_header && answer(from));
  return peer.in_header;
}

bool MessageNetwork::begin_message(int from) {
  auto& peer = incoming_[from];
  if (!read_header(from)) return false;
  const auto& header = peer.header;
  if (header.tag.phase == kQuestion) return false;  // of a later operation
  const auto first = std::find_if(peer.expected.begin(), peer.expected.end(),
                                  [](const Expected& one) { return one.parts == 0; });
  if (first == peer.expected.end()) return false;
  const auto same_operation = [&](const Expected& one) { return one.header.tag.operation == header.tag.operation; };
  const auto operation = std::find_if(first, peer.expected.end(), same_operation);
  // Messages arrive operation by operation, as they are expected.  So a message of an operation for which nothing is
  // expected is wrong, too.  For example, its sender has called an earlier broadcast with another root.
  const auto& wanted = (operation == peer.expected.end() ? *first : *operation).header;
  if (wanted.signature != header.signature) throw header.signature.mismatch(members_, from, wanted.signature);
  const auto found = std::find_if(peer.expected.begin(), peer.expected.end(),
                                  [&](const Expected& one) { return one.header.tag == header.tag; });
  if (found == peer.expected.end()) return false;
  if (found->header.bytes != header.bytes) {
    throw mismatch_of_sizes(members_, from, header.bytes, found->header.bytes);
  }
  std::rotate(peer.expected.begin(), found, found + 1);
  peer.in_header = false;
  peer.in_message = true;
  return true;
}

void MessageNetwork::check_unasked() {
  for (size_t from = 0; current_ && from < incoming_.size(); ++from) {
    auto& peer = incoming_[from];
    const bool is_expected = !peer.expected.empty();
    if (is_expected && (lost_.empty() || peer.in_message)) continue;  // progress() compares it, or has done so
    try {
      if (!look(from)) continue;
    } catch (const ConnectionLost&) {
      continue;  // nothing is expected from this rank, or lost_ has the cause
    }
    if (is_expected) {
      begin_message(from);
    } else if (read_header(from)) {
      const auto& signature = peer.header.signature;
      const bool is_late = signature.sequence > current_->sequence;
      if (!is_late && signature != *current_) throw signature.mismatch(members_, from, *current_);
    }
  }
}

}  // namespace cpulaunch
