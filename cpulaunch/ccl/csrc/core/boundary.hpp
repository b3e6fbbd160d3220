// Both sides of interface.h: one library exports a C++ object as a struct of C, and another library imports the struct
// as an object of the same class.  Each library compiles its own copy of this code.

#pragma once

#include <exception>
#include <memory>
#include <string>

#include "interface.h"
#include "transport.hpp"

namespace cpulaunch {

char* copy_text(const std::string& text);
// Copies a text and frees it; "" for null.
std::string take_text(char* text);

void set_error(cl_error* error, const std::exception& what);
// If there is an error, frees its text and throws it as Mismatch or std::runtime_error.
void throw_error(cl_error& error);

// Returns what `act` returns.  If `act` throws std::exception, stores that in `error` and returns a null value.
template <class Act>
auto guarded(cl_error* error, const Act& act) -> decltype(act()) {
  try {
    return act();
  } catch (const std::exception& what) {
    set_error(error, what);
    return decltype(act())();
  }
}

// Calls `act` with a cl_error and returns its result.  Throws the error, if there is one.
template <class Act>
auto unguarded(const Act& act) {
  cl_error error{};
  auto result = act(&error);
  throw_error(error);
  return result;
}

cl_transfer* export_transfer(std::unique_ptr<Transfer> transfer);
std::unique_ptr<Transfer> import_transfer(cl_transfer* transfer);

cl_transport* export_transport(std::unique_ptr<Transport> transport);
std::unique_ptr<Transport> import_transport(cl_transport* transport);

}  // namespace cpulaunch
