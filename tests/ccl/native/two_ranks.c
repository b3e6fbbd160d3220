/* Two ranks in one thread add their numbers through the C interface alone.  This program is in C, and may be compiled
 * by another compiler than the library.  Prints "ok". */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "interface.h"

enum { kRanks = 2, kNumbers = 100000, kAllReduce = 0, kFloat32 = 1, kSum = 0 };

static void check(int condition, const char* what) {
  if (condition) return;
  fprintf(stderr, "%s\n", what);
  exit(1);
}

int main(void) {
  const int32_t hosts[kRanks] = {0, 0}, sockets[kRanks] = {-1, -1}, numbers[kRanks] = {0, 1};
  static float data[kRanks][kNumbers];
  cl_layout* layouts[kRanks];
  cl_slots* slots[kRanks];
  cl_transport* transports[kRanks];
  cl_transfer* transfers[kRanks];
  cl_error error = {0};
  for (int rank = 0; rank < kRanks; ++rank) {
    layouts[rank] = cl_layout_make(kRanks, rank, hosts, sockets, numbers, NULL, 1, 0);
  }
  const int memory = cl_memory_offer(layouts[0]);
  check(memory >= 0, "no memory");
  for (int rank = 0; rank < kRanks; ++rank) {
    slots[rank] = cl_memory_map(layouts[rank], getpid(), memory);
    check(slots[rank] != NULL, "no mapping");
  }
  close(memory);
  for (int rank = 0; rank < kRanks; ++rank) {
    cl_carrier* carrier = cl_own_carrier(layouts[rank], slots[rank], -1, 0, NULL, NULL, "", 0, NULL, 1, &error);
    check(carrier != NULL, "no carrier");
    transports[rank] = carrier->connect(carrier, NULL, &error);
    check(transports[rank] != NULL && transports[rank]->messages, "no transport");
    cl_carrier_free(carrier);
    for (int i = 0; i < kNumbers; ++i) data[rank][i] = (float)(i + rank);
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    const cl_part part = {(char*)data[rank], sizeof(data[rank])};
    cl_collective sum;
    memset(&sum, 0, sizeof(sum));
    sum.kind = kAllReduce, sum.type = kFloat32, sum.reduction = kSum, sum.root = -1;
    sum.received = &part, sum.received_count = 1;
    transfers[rank] = transports[rank]->functions->start(transports[rank], &sum, &error);
    check(transfers[rank] != NULL, "it is not started");
  }
  for (int done = 0; done < kRanks;) {
    done = 0;
    for (int rank = 0; rank < kRanks; ++rank) done += transfers[rank]->functions->test(transfers[rank], &error);
    check(error.text == NULL, "it has failed");
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    for (int i = 0; i < kNumbers; ++i) check(data[rank][i] == (float)(2 * i + 1), "a sum is wrong");
    transfers[rank]->functions->destroy(transfers[rank]);
    transports[rank]->functions->close(transports[rank], 0);
    transports[rank]->functions->destroy(transports[rank]);
    cl_slots_free(slots[rank]);
    cl_layout_free(layouts[rank]);
  }
  printf("ok\n");
  return 0;
}
