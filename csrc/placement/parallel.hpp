// Layers on threads. Layers are independent, so the result does not depend on how they are shared out.
#pragma once

#include <atomic>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace gimbal::placement {

// Calls body(layer) once for each layer on up to `threads` threads, the calling one included. Returns false when a
// call threw: layers may then be missing.
template <typename Body>
bool for_each_layer(std::size_t layers, std::size_t threads, const Body& body) {
  std::atomic<std::size_t> next{0};
  std::atomic<bool> complete{true};
  const auto work = [&] {
    try {
      for (std::size_t layer = next++; layer < layers; layer = next++) body(layer);
    } catch (...) {  // an exception must not leave a thread, nor cross the C interface
      complete = false;
    }
  };
  std::vector<std::thread> helpers;
  try {
    helpers.reserve(threads);
    for (std::size_t t = 1; t < threads && t < layers; ++t) helpers.emplace_back(work);
  } catch (const std::system_error&) {
    // No more threads to be had: those that started and this one do the work.
  } catch (...) {
    complete = false;
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  return complete;
}

}  // namespace gimbal::placement
