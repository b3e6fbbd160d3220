#include "link.hpp"

namespace cpulaunch {

namespace {

// The higher of two ranks waits for the lower one's connection for this time.
constexpr std::chrono::milliseconds kHeadStart{10};
// Data that a rank has sent before it left arrives within this time, or never.
constexpr std::chrono::seconds kLatest{2};
// A host that acknowledges nothing for this time is gone, or its rank doesn't read.
constexpr std::chrono::seconds kLongestDelivery{10};

}  // namespace

// Once this rank has got data over its own connection, the other one opens none.
bool Link::find() {
  if (is_settled()) return true;
  auto accepted = connector_->take(rank_, channel_);
  if (accepted.is_open()) {
    has_accepted_ = true;
    if (is_open() || !is_shared_) {
      theirs_ = std::move(accepted);
    } else {
      own_ = std::move(accepted);
      broken_.reset();
    }
  }
  return incoming().is_open();
}

void Link::open() {
  find();
  if (is_open()) return;
  connector_->look();
  find();
  if (is_open()) return;
  own_ = connector_->connect(rank_, channel_);
  broken_.reset();  // an earlier attempt may have failed at once
}

// Says nothing over a connection that the other rank has opened.  That rank may have left, and its kernel would then
// drop what it has not delivered yet.
void Link::settle() {
  if (is_settled() && !is_open()) return;
  try {
    open();
    const bool is_theirs = has_accepted_ && !theirs_.is_open();
    if (is_theirs || broken_) return;
    own_.greet();
    if (!is_settled()) own_.hear();
  } catch (const ConnectionLost& error) {
    if (!broken_) broken_.emplace(error);
  }
}

size_t Link::write(const iovec* parts, size_t count) {
  if (!is_open()) find();
  if (!is_open()) {
    const auto now = Clock::now();
    if (!waits_since_) waits_since_ = now;
    if (is_shared_ && !connector_->is_lower_than(rank_) && now - *waits_since_ < kHeadStart) return 0;
    open();
  }
  if (broken_) throw *broken_;
  return own_.write(parts, count);
}

size_t Link::read(char* data, size_t bytes, bool patient, iovec more) {
  if (!find() && (broken_ || !is_shared_ || !connector_->is_lower_than(rank_))) return 0;
  settle();
  return is_settled() ? incoming().read(data, bytes, patient, more) : 0;
}

bool Link::has_left() {
  try {
    if (!is_settled()) connector_->look();
  } catch (const ConnectionLost&) {
    return false;  // this rank has no descriptors left, and can't tell
  }
  try {
    settle();
  } catch (const std::runtime_error&) {
    return false;  // no descriptors either
  }
  if ((is_settled() || !broken_) && !incoming().socket().has_ended()) {
    left_.reset();
    return false;
  }
  const auto now = Clock::now();
  if (!left_) left_ = now;
  return now - *left_ > kLatest;
}

size_t Link::unacknowledged() const { return is_open() ? own_.socket().unacknowledged() : 0; }

bool Delivery::is_over(size_t unacknowledged) {
  const auto now = Clock::now();
  if (unacknowledged != last_) changed_ = now;
  last_ = unacknowledged;
  return unacknowledged == 0 || now - changed_ > kLongestDelivery;
}

}  // namespace cpulaunch
