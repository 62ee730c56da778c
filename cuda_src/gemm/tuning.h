// The fastest of several ways to run one kernel, found while the process runs it: each way is timed a few times, by
// events on the stream of the call. Nothing waits for the device; a later call reads the events that have passed.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace aot {
inline namespace AOT_ISA {

// A capture in another thread is not disturbed by the queries of events in this scope, and does not fail them.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture &) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

template <class Way>
class Tuning {
 public:
  // Ways that may be tried, the best guess first.
  explicit Tuning(std::vector<Way> ways) {
    for (Way &way : ways) candidates_.push_back({way});
  }
  Tuning(const Tuning &) = delete;
  ~Tuning() { destroy_events(); }

  // Runs one of the ways with events around it. run: a function of a way that returns 0 if it has run. Returns false if
  // nothing has run: the stream captures, every way is being timed or has been, or this one failed, which is then not
  // tried again. Errors of events end the tuning.
  template <class F>
  bool run(cudaStream_t stream, F run) {
    std::lock_guard<std::mutex> hold(mutex_);
    if (ended_) return false;
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream, &capture) || capture != cudaStreamCaptureStatusNone) return clear_error(), false;
    RelaxedCapture relaxed;
    if (!read_times()) return clear_error(), end(), false;
    Candidate *next = nullptr;
    bool all_timed = true;
    for (Candidate &c : candidates_) {
      if (c.failed || c.runs == kRuns) continue;
      all_timed = false;
      if (!c.pending && (!next || c.runs < next->runs)) next = &c;
    }
    if (all_timed) return end(), false;
    if (!next) return false;
    if (!next->create_events() || cudaEventRecord(next->begin, stream)) return clear_error(), end(), false;
    if (run(next->way)) return clear_error(), next->failed = true, false;
    if (cudaEventRecord(next->end, stream)) return clear_error(), end(), true;
    return next->pending = true;
  }

  // The fastest by what has been measured; the first until all ways have been timed.
  Way best() {
    std::lock_guard<std::mutex> hold(mutex_);
    return candidates_[best_].way;
  }

 private:
  static constexpr int kRuns = 5;  // of a way; their median counts

  struct Candidate {
    Way way;
    cudaEvent_t begin = nullptr, end = nullptr;
    bool pending = false, failed = false;
    int runs = 0;
    float milliseconds[kRuns] = {};

    bool create_events() { return (begin || !cudaEventCreate(&begin)) && (end || !cudaEventCreate(&end)); }
    float median() {
      std::sort(milliseconds, milliseconds + kRuns);
      return milliseconds[kRuns / 2];
    }
  };

  static void clear_error() { cudaGetLastError(); }

  bool read_times() {
    for (Candidate &c : candidates_) {
      if (!c.pending) continue;
      const cudaError_t passed = cudaEventQuery(c.end);
      if (passed == cudaErrorNotReady) {
        clear_error();
        continue;
      }
      if (passed || cudaEventElapsedTime(&c.milliseconds[c.runs], c.begin, c.end)) return false;
      c.pending = false, ++c.runs;
    }
    return true;
  }

  void end() {
    ended_ = true;
    float least = 0;
    for (size_t i = 0; i < candidates_.size(); ++i) {
      Candidate &c = candidates_[i];
      if (c.failed || c.runs < kRuns) continue;
      const float time = c.median();
      if (!least || time < least) least = time, best_ = i;
    }
    destroy_events();
  }

  void destroy_events() {
    for (Candidate &c : candidates_)
      for (cudaEvent_t *event : {&c.begin, &c.end})
        if (*event) cudaEventDestroy(*event), *event = nullptr;
  }

  std::mutex mutex_;
  std::vector<Candidate> candidates_;
  size_t best_ = 0;
  bool ended_ = false;
};

}  // namespace AOT_ISA
}  // namespace aot
