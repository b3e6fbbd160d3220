// The part of libfabric's binary interface that the network uses, as fabric(7), fi_endpoint(3) and fi_cq(3) describe
// it, in the version FABRIC_1.3, which all libraries since 1.7 (2019) have.
//
// The library is loaded when it is first needed.  Compiling this needs neither the library nor its headers.

#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace cpulaunch::libfabric {

using Address = uint64_t;  // of a peer, in an address vector

constexpr uint32_t kVersion = 1 << 16 | 10;  // of the interface that this is written for

constexpr uint64_t kTagged = 1 << 3, kReceive = 1 << 10, kSend = 1 << 11;  // capabilities; the last two also for queues
constexpr uint64_t kSource = uint64_t{1} << 57;                            // the address belongs to this process
constexpr uint64_t kDirectedReceive = uint64_t{1} << 59;
constexpr uint64_t kContext = uint64_t{1} << 59, kContext2 = uint64_t{1} << 52;  // modes: contexts have room
constexpr uint64_t kSendsInOrder = 1 << 8;
constexpr int kReliableDatagrams = 3;   // a type of endpoint
constexpr int kThreadsOfDomain = 3;     // callers hold a lock for the whole domain
constexpr int kAddressTable = 2;        // a type of address vector
constexpr int kQueuesDontOverflow = 2;  // a kind of resource management
constexpr int kManualProgress = 2;      // data moves only while the library is called
constexpr int kMessageEntries = 2;      // a format of completions
constexpr int kEnable = 6;              // a command
constexpr size_t kContextSize = 8 * sizeof(void*);

struct Object;
struct ObjectFunctions {
  size_t size;
  int (*close)(Object*);
  int (*bind)(Object*, Object*, uint64_t flags);
  int (*control)(Object*, int command, void* argument);
};
struct Object {
  size_t kind;
  void* context;
  ObjectFunctions* functions;
};

// --- what a provider offers, or is asked for

struct SendAttributes {
  uint64_t capabilities, mode, flags, message_order, completion_order;
  size_t inject_size, size, parts, remote_parts;
  uint32_t traffic_class;
};
struct ReceiveAttributes {
  uint64_t capabilities, mode, flags, message_order, completion_order;
  size_t buffered, size, parts;
};
struct EndpointAttributes {
  int type;
  uint32_t protocol, protocol_version;
  size_t longest_message;  // more follow
};
struct DomainAttributes {
  Object* domain;
  char* name;
  int threading, control_progress, data_progress, resource_management, address_vector, memory_mode;  // more follow
};
struct FabricAttributes {
  Object* fabric;
  char* name;
  char* provider;  // more follow
};
struct Offer {
  Offer* next;
  uint64_t capabilities, mode;
  uint32_t address_format;
  size_t source_size, destination_size;
  void *source, *destination;
  Object* handle;
  SendAttributes* send;
  ReceiveAttributes* receive;
  EndpointAttributes* endpoint;
  DomainAttributes* domain;
  FabricAttributes* fabric;
  void* card;
};

// --- objects, each with the functions of its kind

struct Domain;
struct FabricFunctions {
  size_t size;
  int (*domain)(Object* fabric, Offer*, Domain**, void* context);
};
struct Fabric {
  Object object;
  FabricFunctions* functions;
};

struct AddressVectorAttributes {
  int type, context_bits;
  size_t count, endpoints_per_node;
  const char* name;
  void* mapping;
  uint64_t flags;
};
struct AddressVector;
struct AddressVectorFunctions {
  size_t size;
  int (*insert)(AddressVector*, const void* names, size_t count, Address*, uint64_t flags, void* context);
};
struct AddressVector {
  Object object;
  AddressVectorFunctions* functions;
};

struct Completion {
  void* context;
  uint64_t flags;
  size_t bytes;
};
struct Failure {
  void* context;
  uint64_t flags;
  size_t bytes;
  void* memory;
  uint64_t data, tag;
  size_t left_over;
  int error, provider_error;
  void* details;
  size_t details_size;
};
struct QueueAttributes {
  size_t size;
  uint64_t flags;
  int format, wait_object, vector, wait_condition;
  void* wait_set;
};
struct Queue;
struct QueueFunctions {
  size_t size;
  ssize_t (*read)(Queue*, void* entries, size_t count);
  ssize_t (*read_from)(Queue*, void* entries, size_t count, Address*);
  ssize_t (*read_failure)(Queue*, Failure*, uint64_t flags);
};
struct Queue {
  Object object;
  QueueFunctions* functions;
};

struct Endpoint;
struct EndpointFunctions {
  size_t size;
  ssize_t (*cancel)(Object*, void* context);
};
struct ConnectionFunctions {
  size_t size;
  int (*set_name)(Object*, void* name, size_t size);
  int (*get_name)(Object*, void* name, size_t* size);
};
struct TaggedFunctions {
  size_t size;
  ssize_t (*receive)(Endpoint*, void* memory, size_t bytes, void* registration, Address, uint64_t tag,
                     uint64_t ignored_bits, void* context);
  ssize_t (*receive_parts)(Endpoint*, const void* parts, void** registrations, size_t count, Address, uint64_t tag,
                           uint64_t ignored_bits, void* context);
  ssize_t (*receive_message)(Endpoint*, const void* message, uint64_t flags);
  ssize_t (*send)(Endpoint*, const void* memory, size_t bytes, void* registration, Address, uint64_t tag,
                  void* context);
};
struct Endpoint {
  Object object;
  EndpointFunctions* functions;
  ConnectionFunctions* connection;
  void *messages, *remote_memory;
  TaggedFunctions* tagged;
};

struct DomainFunctions {
  size_t size;
  int (*address_vector)(Domain*, AddressVectorAttributes*, AddressVector**, void* context);
  int (*queue)(Domain*, QueueAttributes*, Queue**, void* context);
  int (*endpoint)(Domain*, Offer*, Endpoint**, void* context);
};
struct Domain {
  Object object;
  DomainFunctions* functions;
};

// The loaded library.
struct Library {
  // Loads libfabric by its path, or by its name if the system can find it.  It stays loaded.  Throws
  // std::runtime_error.
  static const Library& load(const std::string& path);

  std::string text_of(ssize_t error) const { return text(static_cast<int>(error < 0 ? -error : error)); }

  Offer* (*copy)(const Offer*);  // copy(nullptr) returns an offer without wishes
  void (*free)(Offer*);
  int (*ask)(uint32_t version, const char* node, const char* service, uint64_t flags, const Offer* wishes, Offer**);
  int (*open)(FabricAttributes*, Fabric**, void* context);
  const char* (*text)(int error);
};

}  // namespace cpulaunch::libfabric
