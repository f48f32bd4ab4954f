// A CUDA device without CUDA, in a build of torch for CPUs. Fake tensors need no kernels, but autograd asks which
// device is current and which stream a gradient is on: here there is one of each, and nothing ever waits.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device device{c10::DeviceType::CUDA, 0};
const c10::Stream stream{c10::Stream::DEFAULT, device};

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Device getDevice() const override { return device; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream; }
  c10::Stream getNewStream(c10::Device, int) const override { return stream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream; }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

} // namespace

namespace at {
namespace {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks)
}
} // namespace at
