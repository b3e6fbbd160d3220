// The two sides of interface.h: what one library exports as structs of C, another one imports as the same C++ class.
// Compiled into each of the libraries.

#pragma once

#include <exception>
#include <memory>
#include <string>

#include "interface.h"
#include "transport.hpp"

namespace cpulaunch {

char* copy_text(const std::string& text);
// Frees it; "" for null.
std::string take_text(char* text);

void set_error(cl_error* error, const std::exception& what);
// Throws Mismatch or std::runtime_error where there is an error, and frees its text.
void throw_error(cl_error& error);

// What `act` returns, or a null of that type where it throws std::exception, which goes to `error`.
template <class Act>
auto guarded(cl_error* error, const Act& act) -> decltype(act()) {
  try {
    return act();
  } catch (const std::exception& what) {
    set_error(error, what);
    return decltype(act())();
  }
}

// What `act` returns, which is called with a cl_error.  Throws what that says.
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
