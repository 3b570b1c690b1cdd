// Functions of the device that the operators need.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <functional>
#include <optional>

namespace simulated {

c10::DeviceIndex device_now();
int stream_now(c10::DeviceIndex device);
void push(std::function<void()> work);  // onto the current stream of the current device
void block_host(const char* why);       // an implicit synchronisation of the current stream
uint64_t draw_seed(const std::optional<at::Generator>& given);
c10::Allocator* allocator();

}  // namespace simulated
