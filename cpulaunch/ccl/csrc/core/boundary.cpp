#include "boundary.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace cpulaunch {

namespace {

static_assert(sizeof(cl_part) == sizeof(Part) && offsetof(cl_part, bytes) == offsetof(Part, bytes));

const cl_part* parts_in_c(const Parts& parts) { return reinterpret_cast<const cl_part*>(parts.data()); }

Parts parts_of_c(const cl_part* parts, size_t count) {
  const auto* begin = reinterpret_cast<const Part*>(parts);
  return {begin, begin + count};
}

// A struct of C that owns a C++ object.
template <class Struct, class Class>
struct Exported : Struct {
  std::unique_ptr<Class> object;

  static Exported& of(Struct* self) { return *static_cast<Exported*>(self); }
};

// --- transfers

Transfer& transfer_of(cl_transfer* self) { return *static_cast<Transfer*>(self); }
const Transfer& transfer_of(const cl_transfer* self) { return *static_cast<const Transfer*>(self); }

constexpr cl_transfer_functions kTransferFunctions = {
    [](cl_transfer* self, cl_error* error) -> int { return guarded(error, [&] { return transfer_of(self).test(); }); },
    [](cl_transfer* self) { transfer_of(self).abort(); },
    [](cl_transfer* self) { return copy_text(transfer_of(self).stragglers()); },
    [](cl_transfer* self, int32_t* rank) -> int {
      const auto peer = transfer_of(self).peer();
      if (peer) *rank = *peer;
      return peer.has_value();
    },
    [](cl_transfer* self, int32_t** ranks) -> int {
      const auto needed = transfer_of(self).needed();
      if (!needed) return -1;
      *ranks = static_cast<int32_t*>(std::malloc((needed->size() + 1) * sizeof(int32_t)));
      std::copy(needed->begin(), needed->end(), *ranks);
      return static_cast<int>(needed->size());
    },
    [](cl_transfer* self) { return copy_text(transfer_of(self).missing()); },
    [](cl_transfer* self, cl_cause* cause) { *cause = transfer_of(self).lost(); },
    [](const cl_transfer* self, uint64_t* steps) -> int {
      const auto done = transfer_of(self).steps();
      if (done) *steps = *done;
      return done.has_value();
    },
    [](const cl_transfer* self) { return transfer_of(self).moved_with(); },
    [](cl_transfer* self) { delete &transfer_of(self); },
};

class ImportedTransfer final : public Transfer {
 public:
  explicit ImportedTransfer(cl_transfer* transfer) : c_(transfer) {}
  ~ImportedTransfer() override { c_->functions->destroy(c_); }

  bool test() override {
    cl_error error{};
    const bool done = c_->functions->test(c_, &error) != 0;
    if (error.text) throw_error(error);
    return done;
  }
  void abort() override { c_->functions->abort(c_); }
  std::string stragglers() override { return take_text(c_->functions->stragglers(c_)); }
  std::optional<int> peer() override {
    int32_t rank;
    return c_->functions->peer(c_, &rank) ? std::optional<int>(rank) : std::nullopt;
  }
  std::optional<std::set<int>> needed() override {
    int32_t* ranks = nullptr;
    const int count = c_->functions->needed(c_, &ranks);
    if (count < 0) return std::nullopt;
    std::set<int> all(ranks, ranks + count);
    std::free(ranks);
    return all;
  }
  std::string missing() override { return take_text(c_->functions->missing(c_)); }
  Cause lost() override {
    Cause cause;
    c_->functions->lost(c_, &cause);
    return cause;
  }
  std::optional<uint64_t> steps() const override {
    uint64_t steps;
    return c_->functions->steps(c_, &steps) ? std::optional<uint64_t>(steps) : std::nullopt;
  }
  const void* moved_with() const override { return c_->functions->moved_with(c_); }

 private:
  cl_transfer* const c_;
};

// --- transports

using ExportedTransport = Exported<cl_transport, Transport>;
Transport& transport_of(cl_transport* self) { return *ExportedTransport::of(self).object; }

constexpr cl_transport_functions kTransportFunctions = {
    [](cl_transport* self, const cl_collective* c, cl_error* error) {
      return guarded(error, [&] {
        return export_transfer(transport_of(self).start(
            {static_cast<Kind>(c->kind), static_cast<NumberType>(c->type), static_cast<Reduction>(c->reduction),
             static_cast<Wire>(c->wire), c->root, c->tag, parts_of_c(c->sent, c->sent_count),
             parts_of_c(c->received, c->received_count), c->source}));
      });
    },
    [](cl_transport* self, cl_error* error) { guarded(error, [&] { transport_of(self).check_calls(); }); },
    [](cl_transport* self) { return static_cast<int>(transport_of(self).leave()); },
    [](cl_transport* self, int in_flight) { transport_of(self).close(in_flight != 0); },
    [](cl_transport* self) { delete &ExportedTransport::of(self); },
};

class ImportedTransport final : public Transport {
 public:
  explicit ImportedTransport(cl_transport* c)
      : Transport({c->messages != 0, c->bitwise != 0, c->shared_memory != 0, c->compressing_hosts}),
        c_(c) {}
  ~ImportedTransport() override { c_->functions->destroy(c_); }

  std::unique_ptr<Transfer> start(const Collective& its) override {
    const cl_collective c{static_cast<uint32_t>(its.kind),
                          static_cast<uint8_t>(its.type),
                          static_cast<uint8_t>(its.reduction),
                          static_cast<uint8_t>(its.wire),
                          its.root,
                          its.tag,
                          parts_in_c(its.sent),
                          parts_in_c(its.received),
                          its.sent.size(),
                          its.received.size(),
                          its.source};
    return import_transfer(unguarded([&](cl_error* error) { return c_->functions->start(c_, &c, error); }));
  }
  void check_calls() override {
    cl_error error{};
    c_->functions->check_calls(c_, &error);
    throw_error(error);
  }
  bool leave() override { return c_->functions->leave(c_) != 0; }
  void close(bool in_flight) override { c_->functions->close(c_, in_flight); }

 private:
  cl_transport* const c_;
};

}  // namespace

char* copy_text(const std::string& text) { return strdup(text.c_str()); }

std::string take_text(char* text) {
  std::string copy = text ? text : "";
  std::free(text);
  return copy;
}

std::string Cause::text() const { return take_text(cl_cause_text(this)); }

void set_error(cl_error* error, const std::exception& what) {
  error->text = copy_text(what.what());
  if (const auto* mismatch = dynamic_cast<const Mismatch*>(&what)) {
    error->cause = static_cast<cl_cause*>(std::malloc(sizeof(cl_cause)));
    *error->cause = mismatch->cause;
    error->has_sequence = mismatch->sequence.has_value();
    error->sequence = mismatch->sequence.value_or(0);
  }
}

void throw_error(cl_error& error) {
  if (!error.text) return;
  const auto text = take_text(error.text);
  error.text = nullptr;
  if (!error.cause) throw std::runtime_error(text);
  const Cause cause(*error.cause);
  std::free(error.cause);
  error.cause = nullptr;
  throw Mismatch(cause, error.has_sequence ? std::optional<uint64_t>(error.sequence) : std::nullopt);
}

Transfer::Transfer() : cl_transfer{&kTransferFunctions} {}

cl_transfer* export_transfer(std::unique_ptr<Transfer> transfer) { return transfer.release(); }

std::unique_ptr<Transfer> import_transfer(cl_transfer* transfer) {
  return std::make_unique<ImportedTransfer>(transfer);
}

cl_transport* export_transport(std::unique_ptr<Transport> transport) {
  auto* exported = new ExportedTransport;
  const auto& can = transport->abilities;
  static_cast<cl_transport&>(*exported) = {&kTransportFunctions, can.messages, can.bitwise, can.shared_memory,
                                           can.compressing_hosts};
  exported->object = std::move(transport);
  return exported;
}

std::unique_ptr<Transport> import_transport(cl_transport* transport) {
  return std::make_unique<ImportedTransport>(transport);
}

}  // namespace cpulaunch
