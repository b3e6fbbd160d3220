#include "hierarchy.hpp"

#include <stdexcept>
#include <thread>

#include "plain_numbers.hpp"

namespace cpulaunch {

namespace {

constexpr std::chrono::milliseconds kCheckInterval{1};

}  // namespace

class Hierarchy::Progress final : public Transfer {
 public:
  Progress(std::shared_ptr<Hierarchy> hierarchy, Operations operations)
      : hierarchy_(std::move(hierarchy)), operations_(std::move(operations)) {}

  bool test() override {
    const auto& [first, second] = operations_;
    return hierarchy_->advance(*first) && (!second || hierarchy_->advance(*second));
  }
  void abort() override { hierarchy_->abort(); }
  std::string stragglers() override { return hierarchy_->stragglers(); }
  std::optional<std::set<int>> needed() override { return hierarchy_->needed(); }
  Cause lost() override { return hierarchy_->lost(); }
  std::optional<uint64_t> steps() const override { return hierarchy_->steps_.load(std::memory_order_relaxed); }
  const void* moved_with() const override { return hierarchy_.get(); }

 private:
  const std::shared_ptr<Hierarchy> hierarchy_;
  const Operations operations_;
};

Hierarchy::Hierarchy(Layout layout, std::shared_ptr<SharedSlots> slots, std::unique_ptr<Network> network)
    : layout(std::move(layout)),
      shape(this->layout),
      slots_(std::move(slots)),
      network_(std::move(network)) {
  if (slots_) slots_->counters(this->layout.local).reads_others = slots_->can_read_all();
  IdleMemory::join();
}

// Frees spare blocks, because tensors that the group's collectives needed may no longer be needed.
Hierarchy::~Hierarchy() {
  IdleMemory::leave();
  SharedBlocks::drop_spares();
}

std::unique_ptr<Transfer> Hierarchy::start(Operations operations) {
  IdleMemory::look_after_others();
  std::lock_guard<std::mutex> lock(mutex_);
  last_start_ = IdleMemory::now();
  holds_memory_ = true;
  for (const auto* each : {&operations.first, &operations.second}) {
    if (!*each) continue;
    (*each)->signature.sequence = gone_ + operations_.size();
    operations_.push_back(*each);
  }
  return std::make_unique<Progress>(shared_from_this(), std::move(operations));
}

// Checks repeatedly: otherwise, two roots that call and leave at the same time would miss each other's messages.
void Hierarchy::check_unasked() {
  for (bool again = network_ != nullptr; again;) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      network_->check_unasked();
      again = network_->may_get_unasked();
    }
    if (again) std::this_thread::sleep_for(kCheckInterval);
  }
}

void Hierarchy::meet() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (network_) network_->meet();
}

void Hierarchy::leave() {
  // Release: a rank that sees that this rank has left also sees all that this rank has taken.
  if (slots_) slots_->counters(layout.local).has_left.store(true, std::memory_order_release);
}

bool Hierarchy::leave_network() {
  std::lock_guard<std::mutex> lock(mutex_);
  return !network_ || aborted_ || network_->leave();
}

// Doesn't wait for the lock: if it is held, the group is at work.
size_t Hierarchy::give_back(IdleMemory::Time now) {
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock || !holds_memory_ || now - last_start_ < IdleMemory::kAfter || !is_idle()) return 0;
  holds_memory_ = false;
  mapped_.drop_freed();
  staging_ = {};
  return slots_ ? slots_->give_back(layout.local) : 0;
}

// Others read and write a piece in this rank's slots from when it is put until they have taken it (see hierarchy.hpp).
bool Hierarchy::is_idle() const {
  if (!operations_.empty() || aborted_ || mismatch_) return false;
  return put_.number == 0 || others_passed(&SharedSlots::Counters::taken, put_.number - 1);
}

char* Hierarchy::Staging::of(size_t needed) {
  if (bytes < needed) {
    memory.reset(new char[needed]);
    bytes = needed;
  }
  return memory.get();
}

bool Hierarchy::reads_directly() const {
  for (int local = 0; local < layout.locals; ++local) {
    if (!slots_->counters(local).reads_others) return false;
  }
  return true;
}

char* Hierarchy::tensor(int local, Piece piece, size_t bytes) {
  const auto& theirs = slots_->counters(local);
  const auto& place = theirs.pieces[index(piece)].tensor;
  return place ? mapped_.at(theirs.pid, place, bytes) : nullptr;
}

// Release and acquire: a rank that sees the mark also sees what is in the slot.
void Hierarchy::set_mark(Mark mark, Piece piece) {
  (slots_->counters(layout.local).*mark)[index(piece)].store(piece.of_all + 1, std::memory_order_release);
}

bool Hierarchy::has_mark(Mark mark, int local, Piece piece) const {
  return (slots_->counters(local).*mark)[index(piece)].load(std::memory_order_acquire) == piece.of_all + 1;
}

Tag Hierarchy::tag(const Operation& operation, uint64_t piece, size_t phase, size_t lane) const {
  return {operation.signature.sequence, static_cast<uint32_t>(piece), static_cast<uint16_t>(phase),
          static_cast<uint16_t>(lane)};
}

bool Hierarchy::advance(Operation& operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  const PlainNumbers plain;
  batch_.clear();  // an error may have left something
  const auto done = [&] { return operation.collected_ && operation.is_drained(); };
  try {
    // Move many small pieces at a time, but only one large piece, because a waiting caller looks at the clock in
    // between.
    for (size_t moved = 0; !done() && !aborted_ && !mismatch_ && moved < shape.slot_size;) {
      size_t bytes = step();
      if (bytes == 0 && network_) bytes = network_->progress();
      if (bytes == 0) break;
      moved += bytes;
      steps_.fetch_add(1, std::memory_order_relaxed);
    }
  } catch (const Mismatch& found) {
    mismatch_ = found;
  }
  if (done() || !mismatch_) return done();
  // If the error belongs to another operation, leave it to that operation, unless that one is complete.
  const auto whose = mismatch_->sequence;
  if (!whose || *whose < gone_ || *whose == operation.signature.sequence) throw *mismatch_;
  return false;
}

// The other local ranks then see this rank before its first piece, and go no further.  A rank that has read the
// counters earlier may continue with this rank's slots: they keep their content, because nothing more is put.  The
// stores have the default memory order, which is stronger than needed: they order nothing, and this is no hot path.
void Hierarchy::abort() {
  std::lock_guard<std::mutex> lock(mutex_);
  aborted_ = true;
  if (network_) network_->close();
  if (!slots_) return;
  for (const auto counter : {&SharedSlots::Counters::put, &SharedSlots::Counters::taken}) {
    (slots_->counters(layout.local).*counter).store(0);
  }
}

std::string Hierarchy::stragglers() {
  std::lock_guard<std::mutex> lock(mutex_);
  auto late = behind(&SharedSlots::Counters::put);
  if (late.empty() && network_) late = network_->awaited();
  if (late.empty()) late = behind(&SharedSlots::Counters::taken);
  std::string ranks;
  for (const int rank : late) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  return ranks;
}

// A rank that has completed an operation has taken all of its pieces, and may end.  The others still need a rank that
// has not taken them all.
std::set<int> Hierarchy::needed() {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto ranks = behind(&SharedSlots::Counters::taken);
  return {ranks.begin(), ranks.end()};
}

std::vector<int> Hierarchy::behind(Counter counter) const {
  std::vector<int> ranks;
  for (int local = 0; slots_ && local < layout.locals; ++local) {
    // Relaxed: no other memory is read because of this number.
    const auto number = (slots_->counters(local).*counter).load(std::memory_order_relaxed);
    if (local != layout.local && number < put_.number) ranks.push_back(layout.ranks_of[layout.host][local]);
  }
  return ranks;
}

Cause Hierarchy::lost() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int local = 0; slots_ && local < layout.locals; ++local) {
    const auto& theirs = slots_->counters(local);
    if (!theirs.has_left.load(std::memory_order_acquire) || theirs.taken >= put_.number) continue;
    return Cause(CauseKind::peer_left, layout.members, layout.ranks_of[layout.host][local]);
  }
  return network_ ? network_->lost() : Cause();
}

// --- the stages

Operation* Hierarchy::move_on(Cursor& cursor) {
  if (cursor.operation < gone_) cursor = {cursor.number, gone_, 0};
  for (; cursor.operation < gone_ + operations_.size(); ++cursor.operation, cursor.of_operation = 0) {
    auto& operation = *operations_[cursor.operation - gone_];
    if (!operation.begun_ || !operation.is_ready()) return nullptr;
    if (cursor.of_operation < operation.pieces()) return &operation;
  }
  return nullptr;
}

// Tries the last stage first, because it frees slots.
size_t Hierarchy::step() {
  for (const auto stage :
       {&Hierarchy::collect, &Hierarchy::exchange, &Hierarchy::start_piece, &Hierarchy::take, &Hierarchy::put}) {
    if (const size_t bytes = (this->*stage)()) return bytes;
  }
  return enter();
}

size_t Hierarchy::collect() {
  auto* operation = move_on(collected_);
  size_t moved = 0;
  if (operation && collected_.number < exchanged_.number &&
      (!operation->collects(collected_.piece()) || others_passed(&SharedSlots::Counters::taken, collected_.number))) {
    operation->collect(collected_.piece());
    collected_.pass();
    moved = operation->piece_bytes;
    move_on(collected_);
  }
  // Operations before the cursor's are complete, except for what is not in pieces.
  for (; gone_ < collected_.operation; ++gone_) {
    operations_.front()->collected_ = true;
    operations_.pop_front();
    moved += 1;
  }
  return moved;
}

size_t Hierarchy::exchange() {
  for (Cursor each = exchanged_; auto* operation = move_on(each);) {
    if (each.number >= started_.number) break;
    auto& done = done_[each.number % shape.slots];
    if (done != each.number + 1 && operation->exchange(each.piece())) done = each.number + 1;
    if (each.number == exchanged_.number && done == each.number + 1) {
      each.pass();
      exchanged_ = each;
      // Release: a rank that sees the piece taken also sees what this rank has written to that rank's slot.  This rank
      // no longer reads the slot, so it may be overwritten.
      if (slots_) slots_->counters(layout.local).taken.store(each.number, std::memory_order_release);
      return operation->piece_bytes;
    }
    each.pass();
  }
  return 0;
}

size_t Hierarchy::start_piece() {
  auto* operation = move_on(started_);
  if (!operation || started_.number >= taken_.number || !operation->start(started_.piece())) return 0;
  started_.pass();
  return 1;
}

size_t Hierarchy::take() {
  auto* operation = move_on(taken_);
  if (!operation || taken_.number >= put_.number) return 0;
  if (!others_passed(&SharedSlots::Counters::put, taken_.number)) return 0;
  check_alike(*operation);
  operation->take(taken_.piece());
  taken_.pass();
  const size_t piece_bytes = operation->piece_bytes;
  return piece_bytes + start_piece() + exchange();
}

size_t Hierarchy::put() {
  auto* operation = move_on(put_);
  if (!operation || put_.number >= entered_.number) return 0;
  const bool is_free = put_.number < shape.slots ||
                       others_passed(&SharedSlots::Counters::taken, put_.number - shape.slots);
  if (!is_free || !operation->can_put(put_.piece())) return 0;
  operation->put(put_.piece());
  if (slots_) {
    auto& counters = slots_->counters(layout.local);
    counters.pieces[put_.number % shape.slots] = {operation->signature, operation->tensor};
    // Release: a rank that sees the piece put also sees the slot's content and its signature.
    counters.put.store(put_.number + 1, std::memory_order_release);
  }
  put_.pass();
  return operation->piece_bytes;
}

size_t Hierarchy::enter() {
  move_on(entered_);
  if (entered_.operation < gone_ + operations_.size() && entered_.of_operation == 0) {
    auto& next = *operations_[entered_.operation - gone_];
    // With several hosts, an operation begins when the previous one has been exchanged, so their messages don't mix.
    if (!next.begun_ && next.is_ready() && (!network_ || exchanged_.number == entered_.number)) {
      mapped_.drop_freed();
      if (network_) network_->enter(next.signature);
      next.begin();
      next.begun_ = true;
      move_on(entered_);
    }
  }
  auto* operation = move_on(entered_);
  if (!operation || entered_.number >= collected_.number + shape.slots) return 0;
  operation->enter(entered_.piece());
  entered_.pass();
  return 1;
}

// If a rank has called something else, or with other tensors, its slots don't hold what this rank expects.
void Hierarchy::check_alike(const Operation& operation) const {
  for (int local = 0; slots_ && local < layout.locals; ++local) {
    const auto& theirs = slots_->counters(local).pieces[taken_.number % shape.slots].signature;
    if (theirs != operation.signature) {
      throw theirs.mismatch(layout.members, layout.ranks_of[layout.host][local], operation.signature);
    }
  }
}

bool Hierarchy::others_passed(Counter counter, uint64_t number) const {
  for (int local = 0; slots_ && local < layout.locals; ++local) {
    // Acquire: everything that the other rank did before it stored the counter precedes what this rank reads or
    // overwrites next.
    if (local != layout.local && (slots_->counters(local).*counter).load(std::memory_order_acquire) <= number) {
      return false;
    }
  }
  return true;
}

}  // namespace cpulaunch
