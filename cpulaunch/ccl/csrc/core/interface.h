/* The C interface between the three shared libraries:
 *
 *     libcpulaunch_ccl.so      the core: shared memory, TCP, operations, liveness.  Knows neither torch nor oneCCL
 *     _group.so                torch's process group; compiled for one series of torch
 *     libcpulaunch_oneccl.so   oneCCL as a transport; optional
 *
 * The libraries may be built with different compilers and C++ libraries.  So they use only those parts of each other
 * that are declared here, and no exception crosses the interface.  The caller must free() the texts that a function
 * returns or leaves in a cl_error.
 */
#ifndef CPULAUNCH_CCL_INTERFACE_H
#define CPULAUNCH_CCL_INTERFACE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CL_EXPORT __attribute__((visibility("default")))

/* --- what a rank calls; all ranks of a group must call the same */
typedef struct cl_call {
  char kind[16], type[12], reduction[12]; /* "" if it doesn't matter */
  int32_t root;                           /* its number in the job; -1: no root */
  int32_t compressed;                     /* between hosts */
  int64_t bytes;                          /* -1: may differ between ranks */
  uint64_t sequence;
} cl_call;

/* --- why something failed (cause.hpp) */
typedef struct cl_cause {
  uint32_t kind;          /* a CauseKind; 0: nothing failed */
  int32_t rank;           /* the rank that the cause is about; -1: none.  All ranks are numbers in the job */
  int32_t finder;         /* the rank that found the cause; -1: this one */
  int32_t parts_differ;   /* `theirs` and `own` are equal, but the parts have different sizes */
  int64_t milliseconds;   /* of silence */
  int64_t timeout;        /* in milliseconds; 0: no timeout was over */
  int64_t bytes, expected;
  uint64_t sequence;      /* of the finder's operation */
  cl_call theirs, own;
  char operation[32];     /* the finder's operation */
  char host[64];          /* the rank's host; "" if there is only one */
  char detail[400];
} cl_cause;

/* --- an error; `text` is null if there is none */
typedef struct cl_error {
  char* text;
  cl_cause* cause;      /* null unless the ranks call different operations */
  int has_sequence;     /* `sequence` is valid: the number of this rank's operation */
  uint64_t sequence;
} cl_error;

/* --- a transfer (transfer.hpp documents the functions) */
typedef struct cl_transfer cl_transfer;
typedef struct cl_transfer_functions {
  int (*test)(cl_transfer*, cl_error*);            /* 1: done */
  void (*abort)(cl_transfer*);
  char* (*stragglers)(cl_transfer*);
  int (*peer)(cl_transfer*, int32_t* rank);        /* 0: not a message */
  int (*needed)(cl_transfer*, int32_t** ranks);    /* the number of ranks; -1: all.  The caller must free() `ranks` */
  char* (*missing)(cl_transfer*);
  void (*lost)(cl_transfer*, cl_cause*);
  int (*steps)(const cl_transfer*, uint64_t* steps); /* 0: not counted */
  const void* (*moved_with)(const cl_transfer*);
  void (*destroy)(cl_transfer*);
} cl_transfer_functions;
struct cl_transfer {
  const cl_transfer_functions* functions;
};

/* --- a collective (collective.hpp documents the fields) */
typedef struct cl_part {
  char* data;
  size_t bytes;
} cl_part;
typedef struct cl_collective {
  uint32_t kind;
  uint8_t type, reduction, wire;
  int32_t root, tag;
  const cl_part *sent, *received;
  size_t sent_count, received_count;
  int32_t* source;
} cl_collective;

/* --- a transport (transport.hpp) */
typedef struct cl_transport cl_transport;
typedef struct cl_transport_functions {
  cl_transfer* (*start)(cl_transport*, const cl_collective*, cl_error*); /* null with an error */
  void (*check_calls)(cl_transport*, cl_error*);
  int (*leave)(cl_transport*);
  void (*close)(cl_transport*, int in_flight);
  void (*destroy)(cl_transport*);
} cl_transport_functions;
struct cl_transport {
  const cl_transport_functions* functions;
  int messages, bitwise, shared_memory, compressing_hosts;
};

/* --- a group's store, used while its ranks connect */
typedef struct cl_store {
  void* self;
  /* 1: the caller must free() `value`; 0: there is no such key. */
  int (*get)(void* self, const char* key, char** value, size_t* size, cl_error*);
  void (*set)(void* self, const char* key, const char* value, size_t size, cl_error*);
} cl_store;

/* --- a carrier makes a transport.  connect() connects the ranks, which may take long; it needs the store until it
 * returns. */
typedef struct cl_carrier cl_carrier;
struct cl_carrier {
  cl_transport* (*connect)(cl_carrier*, const cl_store*, cl_error*);
  void (*destroy)(cl_carrier*);
};

/* === what the core exports */

/* Returns the sentence for a cause. */
CL_EXPORT char* cl_cause_text(const cl_cause*);

/* --- which rank is on which host */
typedef struct cl_layout cl_layout;
/* The arrays have an item for each rank: its host and socket (-1: unknown), its number in the job, and the name of its
 * host.  `host_names` is null if there is only one host.  Each rank computes with at least `threads` threads.  `cache`:
 * this rank's part of the last-level cache, in bytes. */
CL_EXPORT cl_layout* cl_layout_make(int32_t size, int32_t rank, const int32_t* host_of, const int32_t* socket_of,
                                    const int32_t* numbers, const char* const* host_names, int32_t threads,
                                    uint64_t cache);
CL_EXPORT void cl_layout_free(cl_layout*);
/* For libraries other than the core. */
typedef struct cl_layout_facts {
  int32_t rank, size;
} cl_layout_facts;
CL_EXPORT cl_layout_facts cl_layout_look(const cl_layout*);

/* --- memory of a host's ranks */
typedef struct cl_slots cl_slots;
/* Returns a descriptor of new memory for the ranks of this host; -1 if that fails. */
CL_EXPORT int cl_memory_offer(const cl_layout*);
/* Maps the memory that another rank of this host offers; null if this rank may not open it. */
CL_EXPORT cl_slots* cl_memory_map(const cl_layout*, int pid, int descriptor);
CL_EXPORT void cl_slots_free(cl_slots*);

/* --- transports */
/* Returns a listening socket for connections from ranks of other hosts; -1 and an error if that fails. */
CL_EXPORT int cl_listen(const char* ip, int32_t* port, cl_error*);
/* Sets the ports on which this process listens from now on: `first` to `last`, or any if these are 0. */
CL_EXPORT void cl_listen_within(int32_t first, int32_t last);
/* This rank's endpoint in libfabric.  `library` is libfabric's path or name; `ip` is an address of this host, or "" to
 * leave it to the provider.  Returns null and an error if that fails. */
typedef struct cl_endpoint cl_endpoint;
CL_EXPORT cl_endpoint* cl_endpoint_open(const char* library, const char* ip, cl_error*);
CL_EXPORT void cl_endpoint_free(cl_endpoint*);
CL_EXPORT const char* cl_endpoint_name(const cl_endpoint*, size_t* size); /* by which others reach it; the endpoint's */
/* Takes the names of all ranks' endpoints. */
CL_EXPORT void cl_endpoint_know(cl_endpoint*, const char* const* names, const size_t* sizes, int32_t count, cl_error*);
/* `slots` may be null if this rank is alone on its host; the caller keeps them.  `listener` is -1 if there is only one
 * host; else the carrier owns it.  `ips` and `ports` have an item for each rank, and `key` is the group's secret.  An
 * `endpoint` carries the collectives between hosts, and its content moves to the carrier; null: TCP carries them, over
 * this many `connections` between two ranks of different hosts.  All ranks pass the same number. */
CL_EXPORT cl_carrier* cl_own_carrier(const cl_layout*, const cl_slots* slots, int listener, int32_t port,
                                     const char* const* ips, const int32_t* ports, const char* key,
                                     size_t key_size, cl_endpoint* endpoint, int32_t connections, cl_error*);
CL_EXPORT void cl_carrier_free(cl_carrier*);
/* Divides numbers in place, to make averages of sums. */
CL_EXPORT void cl_divide(char* data, size_t bytes, uint8_t type, int divisor);

/* --- threads that help the calling thread to copy, to sum and to send (team.hpp) */
typedef struct cl_team cl_team;
struct cl_team {
  int32_t size;  /* the most threads that work at the same time, including the calling one */
  int32_t polls; /* 1: the threads poll between two runs, so that a short run pays off */
  /* Calls part(argument, i) on these threads, for each i below `parts`.  Returns when all calls have returned. */
  void (*run)(const cl_team*, int32_t parts, void (*part)(void* argument, int32_t index), void* argument);
};
/* Sets the team that helps the calling thread from now on; null: none.  Returns the previous one. */
CL_EXPORT const cl_team* cl_lend_team(const cl_team*);
/* Returns how many bytes the calling thread has copied, and how many it has read for sums, since it started. */
CL_EXPORT void cl_moved(uint64_t* copied, uint64_t* summed);

/* --- tensors in memory that the host's ranks share (shared_blocks.hpp) */
CL_EXPORT char* cl_block_copy(const char* from, size_t bytes);
CL_EXPORT char* cl_block_take(size_t bytes);
CL_EXPORT void cl_block_free(char* memory);
CL_EXPORT int cl_block_holds(const char* memory, size_t bytes);

/* --- the clock (clock.hpp): nanoseconds */
CL_EXPORT int64_t cl_clock_now(void);
CL_EXPORT int64_t cl_clock_steady(int64_t time);

/* --- whether other processes are alive (liveness.hpp); cl_..._free() frees what the function above it returns */
/* The time after which a silent host counts as gone is divided into this many parts.  After the first part, this rank
 * starts to probe the host's kernel. */
#define CL_SILENT_PARTS 3

typedef struct cl_process cl_process;
CL_EXPORT cl_process* cl_process_of(int32_t pid);
CL_EXPORT void cl_process_free(cl_process*);
/* The system's error if the process can't be watched, else 0. */
CL_EXPORT int cl_process_error(const cl_process*);
CL_EXPORT int cl_process_has_ended(const cl_process*);

typedef struct cl_server cl_server;
/* The server of a store to which this process is connected.  If `host` is null, it never counts as gone. */
CL_EXPORT cl_server* cl_server_of(const char* host, int32_t port);
CL_EXPORT void cl_server_free(cl_server*);
CL_EXPORT int cl_server_is_gone(const cl_server*);
CL_EXPORT void cl_server_make_patient(const cl_server*);
CL_EXPORT void cl_server_begin_query(cl_server*);
CL_EXPORT int64_t cl_server_end_query(cl_server*); /* returns how long the query took, in nanoseconds */
CL_EXPORT int cl_server_is_silent_for(cl_server*, int64_t milliseconds);

typedef struct cl_beacon cl_beacon;
CL_EXPORT cl_beacon* cl_beacon_make(const char* ip); /* null if this host can't listen on that address */
CL_EXPORT void cl_beacon_free(cl_beacon*);
CL_EXPORT const char* cl_beacon_address(const cl_beacon*); /* owned by the beacon */
CL_EXPORT void cl_beacon_close_connections(const cl_beacon*);

typedef struct cl_remote cl_remote;
CL_EXPORT cl_remote* cl_remote_at(const char* address);
CL_EXPORT void cl_remote_free(cl_remote*);
CL_EXPORT int cl_remote_is_there(const cl_remote*, int64_t within_milliseconds);
CL_EXPORT int cl_remote_has_ended(cl_remote*);

#ifdef __cplusplus
}
#endif

#endif
