// send and recv.

#include "buffers.hpp"
#include "group.hpp"

namespace cpulaunch {

using c10d::OpType;

namespace {

void check_peer(const Invalid& invalid, int peer, int rank, int size) {
  if (peer < 0 || peer >= size || peer == rank) {
    invalid(c10::str("there is no other rank ", peer, " in this group of ", size));
  }
}

}  // namespace

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::send(Tensors& tensors, int to, int tag) {
  if (!transport("send").abilities.messages) return gloo().send(tensors, to, tag);
  const Invalid invalid{"send"};
  const auto& tensor = single(invalid, tensors);
  check_tensor(invalid, tensor);
  check_peer(invalid, to, getRank(), getSize());
  const auto work = begin_message(OpType::SEND, "send", "ccl:send", tensors, to);
  const auto data = to_send(*work, tensor);
  Collective collective{Kind::send};
  collective.root = to;
  collective.tag = tag;
  collective.sent = {part_of(data)};
  return run(work, /*asynchronous=*/true, &collective);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::recv(Tensors& tensors, int from, int tag) {
  if (!transport("recv").abilities.messages) return gloo().recv(tensors, from, tag);
  check_peer({"recv"}, from, getRank(), getSize());
  return receive("recv", tensors, from, tag);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::recvAnysource(Tensors& tensors, int tag) {
  if (!transport("recv").abilities.messages) return gloo().recvAnysource(tensors, tag);
  return receive("recv from any rank", tensors, Collective::kAnySource, tag);
}

ProcessGroupCCL::Ptr<c10d::Work> ProcessGroupCCL::receive(const char* name, Tensors& tensors, int from, int tag) {
  const Invalid invalid{name};
  const auto& tensor = single(invalid, tensors);
  check_tensor(invalid, tensor);
  const auto work = begin_message(OpType::RECV, name, "ccl:recv", tensors, from);
  const auto data = to_receive(*work, tensor);
  work->set_outputs(tensors);
  Collective collective{Kind::receive};
  collective.root = from;
  collective.tag = tag;
  collective.received = {part_of(data)};
  collective.source = work->source(from);
  return run(work, /*asynchronous=*/true, &collective);
}

}  // namespace cpulaunch
