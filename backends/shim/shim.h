// What every file of the shim shares: how a C++ exception becomes a return code.
#pragma once
#include <cstdint>
#include <exception>
#include <string>

// The last error of this thread; read by anyroll_last_error right after a call that failed.
inline thread_local std::string last_error;

// Runs `body`, a lambda, and returns its value; on an exception keeps the message and returns `failed`.
template <typename R, typename Body>
R guarded(R failed, Body body) noexcept {
  try {
    return body();
  } catch (const std::exception& e) {
    last_error = e.what();
  } catch (...) {
    last_error = "unknown C++ exception";
  }
  return failed;
}
