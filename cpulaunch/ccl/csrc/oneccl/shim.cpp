// Defines what oneCCL's static archive refers to and does not contain: Intel's compiler runtime, ITT tracing, hwloc.
// The link fails if a symbol is missing here, and a test fails if there is one too many.
//
// The stubs of hwloc report that there is no topology.  oneCCL would use hwloc to bind the memory of its workers to
// their NUMA node, which a rank's memory policy already does: binding has one owner, and it is not this library.

#include <cstddef>
#include <cstring>

extern "C" {

void* _intel_fast_memcpy(void* to, const void* from, size_t bytes) { return std::memcpy(to, from, bytes); }
void* _intel_fast_memset(void* to, int value, size_t bytes) { return std::memset(to, value, bytes); }

// ITT's entry points are null unless a collector is attached.
#define NO_COLLECTOR(name) void* __itt_##name##_ptr__3_0 = nullptr;
NO_COLLECTOR(domain_create)
NO_COLLECTOR(event_create)
NO_COLLECTOR(event_start)
NO_COLLECTOR(event_end)
NO_COLLECTOR(metadata_add)
NO_COLLECTOR(string_handle_create)
NO_COLLECTOR(task_begin)
NO_COLLECTOR(task_end)
NO_COLLECTOR(thread_set_name)

// Every use of hwloc in oneCCL follows a successful hwloc_topology_init.
int hwloc_topology_init(void**) { return -1; }
#define NO_TOPOLOGY(name) \
  long hwloc_##name() { return -1; }
NO_TOPOLOGY(alloc_membind)
NO_TOPOLOGY(bitmap_alloc)
NO_TOPOLOGY(bitmap_and)
NO_TOPOLOGY(bitmap_first)
NO_TOPOLOGY(bitmap_free)
NO_TOPOLOGY(bitmap_isincluded)
NO_TOPOLOGY(bitmap_isset)
NO_TOPOLOGY(bitmap_iszero)
NO_TOPOLOGY(bitmap_next)
NO_TOPOLOGY(bitmap_only)
NO_TOPOLOGY(bitmap_taskset_snprintf)
NO_TOPOLOGY(bitmap_weight)
NO_TOPOLOGY(bitmap_zero)
NO_TOPOLOGY(free)
NO_TOPOLOGY(get_area_membind)
NO_TOPOLOGY(get_obj_by_depth)
NO_TOPOLOGY(get_proc_cpubind)
NO_TOPOLOGY(get_type_depth)
NO_TOPOLOGY(memattr_get_value)
NO_TOPOLOGY(obj_attr_snprintf)
NO_TOPOLOGY(obj_type_snprintf)
NO_TOPOLOGY(obj_type_string)
NO_TOPOLOGY(set_membind)
NO_TOPOLOGY(topology_destroy)
NO_TOPOLOGY(topology_get_support)
NO_TOPOLOGY(topology_load)
NO_TOPOLOGY(topology_set_io_types_filter)
}
