// The way to another rank and back, on one channel.
//
// In a group of few hosts, each rank opens the connection over which it sends.  While a process reads or writes, the
// kernel locks the connection, and what arrives has to wait.  So over a shared one, two ranks take up to 1.3 times as
// long to exchange some MB.
//
// In a group of many hosts, where a rank rarely sends much to the rank from which it receives, there would be too many
// connections.  So one serves both directions, and either rank may open it.  The lower rank opens it as soon as it
// needs the other one.  The higher rank first waits a moment for that connection.  If none comes, the lower rank is
// busy, and the higher one opens a connection, so that its data can wait in the kernel of the lower rank's host.  If
// both open one at the same moment, both stay, and each rank sends over its own.
//
// So all that a rank sends over a channel goes over one connection.
//
// If a process ends before it has read everything, the kernel resets the connection, and drops the data that is still
// on its way to the other rank.  So a rank that leaves waits until the other hosts have received everything (Delivery).

#pragma once

#include <optional>

#include "clock.hpp"
#include "connector.hpp"

namespace cpulaunch {

class Link {
 public:
  // Keeps a reference to the connector.  All ranks of a group pass the same `is_shared`: whether one connection serves
  // both directions.
  Link(Connector& connector, int rank, Channel channel, bool is_shared)
      : connector_(&connector), rank_(rank), channel_(channel), is_shared_(is_shared) {}

  // Whether there is a connection over which this rank sends.  While there is none, the caller looks for new
  // connections (Connector::look) before it writes.
  bool is_open() const { return own_.is_open(); }
  // Whether it is known which connection brings the other rank's data.  While it isn't, the caller looks for new
  // connections before it reads.
  bool is_settled() const { return has_accepted_ || own_.has_heard(); }
  // Of the connection that is read; -1 if there is none.
  int descriptor() const { return incoming().socket().descriptor(); }
  // As in Connection.  If there is no connection, both may open one, and then throw as open() does, or return 0.
  // While is_settled() is false, read() doesn't throw ConnectionLost, because the other rank may have sent something
  // over a connection of its own: has_left() finds that out, and write() throws the error.
  size_t read(char* data, size_t bytes, bool patient = false, iovec more = {});
  size_t write(const iovec* parts, size_t count);
  // Returns whether there is a connection to read, without opening one.
  bool find();
  // Opens a connection if there is none.  Throws ConnectionLost if the rank can't be reached, and std::runtime_error if
  // this process may not have more descriptors.
  void open();
  // Returns whether the other rank has ended, or left the group, and nothing more of its can arrive.
  bool has_left();
  // The bytes that the other rank's host may not have received.
  size_t unacknowledged() const;

 private:
  // Opens a connection if there is none.  Says hello over the one that this rank has opened, and finds out whether the
  // other rank answers.
  void settle();
  const Connection& incoming() const { return theirs_.is_open() ? theirs_ : own_; }
  Connection& incoming() { return theirs_.is_open() ? theirs_ : own_; }

  Connector* connector_;
  int rank_;
  Channel channel_;
  bool is_shared_;
  Connection own_;     // that this rank sends over
  Connection theirs_;  // that only the other rank sends over
  bool has_accepted_ = false;                     // the other rank has opened one of the two
  std::optional<ConnectionLost> broken_;          // why this rank's own connection can't be used
  std::optional<Clock::time_point> waits_since_;  // when this rank first had something to write, but no connection
  std::optional<Clock::time_point> left_;         // when the other rank was first seen to be gone
};

// Finds out whether the other hosts have received what a rank has sent.
class Delivery {
 public:
  // `unacknowledged` is the number of bytes that they may not have received.  Returns true once that is 0, and if it
  // has not changed for a while: a rank doesn't wait forever for a host that is gone.
  bool is_over(size_t unacknowledged);

 private:
  size_t last_ = 0;
  Clock::time_point changed_;
};

}  // namespace cpulaunch
