// What torch asks of a GPU before its autograd engine handles tensors on one: that it is there, and has one stream.
// No kernel, no memory: `tensors.py` computes on the CPU. What torch's compiler asks in addition (`h100.py`) is answered
// while `set_generating` is on: values could not be computed with it.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kGpu = c10::DeviceType::CUDA;

constexpr long kCuDNN = 91900;  // 9.19

bool is_generating = false;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kGpu> {
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, c10::Device(kGpu, 0)); }
  c10::Device exchangeDevice(c10::Device) const override { return {kGpu, 0}; }
  c10::Device getDevice() const override { return {kGpu, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace

namespace at {  // where the registry of hooks lives

struct FakeHooks final : CUDAHooksInterface {
  explicit FakeHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  bool hasCuDNN() const override { return is_generating; }
  bool compiledWithCuDNN() const override { return is_generating; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  double batchnormMinEpsilonCuDNN() const override { return 0.0; }
  long versionCuDNN() const override { return kCuDNN; }
  long versionRuntimeCuDNN() const override { return kCuDNN; }
};

C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeHooks)

}  // namespace at

namespace {

// Roughly what a GPU chooses of its kernels: flash attention in 16 bits without a mask, else the one that saves memory,
// which has no groups of heads.
int64_t choose_attention(
    const at::Tensor& query,
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>& mask,
    double,
    bool,
    std::optional<double>,
    bool has_groups) {
  auto chosen = sdp::SDPBackend::math;
  if (is_generating && !mask.has_value() && query.scalar_type() != at::kFloat)
    chosen = sdp::SDPBackend::flash_attention;
  else if (is_generating && !has_groups)
    chosen = sdp::SDPBackend::efficient_attention;
  return static_cast<int64_t>(chosen);
}

}  // namespace

namespace at::native {

REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &choose_attention)

}  // namespace at::native

extern "C" void set_generating(bool is_on) { is_generating = is_on; }
