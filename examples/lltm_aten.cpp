// The LLTM on ATen's operators, as the C++ extension of PyTorch's tutorial: for comparison only. lltm.py compiles it.
#include <torch/extension.h>

#include <vector>

// Returns new_h and new_cell, then what the backward needs.
std::vector<at::Tensor> lltm_forward(at::Tensor input, at::Tensor weights, at::Tensor bias, at::Tensor old_h,
                                     at::Tensor old_cell) {
  auto x = at::cat({old_h, input}, 1);
  auto gates = at::addmm(bias, x, weights.t()).chunk(3, 1);
  auto input_gate = at::sigmoid(gates[0]), output_gate = at::sigmoid(gates[1]), candidate_cell = at::elu(gates[2]);
  auto new_cell = old_cell + candidate_cell * input_gate;
  auto tanh_cell = at::tanh(new_cell);
  return {tanh_cell * output_gate, new_cell, x, input_gate, output_gate, candidate_cell, tanh_cell};
}

// Returns the gradients of input, weights, bias, old_h and old_cell.
std::vector<at::Tensor> lltm_backward(at::Tensor dh, at::Tensor dcell, at::Tensor weights, at::Tensor x,
                                      at::Tensor input_gate, at::Tensor output_gate, at::Tensor candidate_cell,
                                      at::Tensor tanh_cell) {
  auto doutput_gate = dh * tanh_cell * output_gate * (1 - output_gate);
  auto dold_cell = dcell + dh * output_gate * (1 - tanh_cell * tanh_cell);
  auto dinput_gate = dold_cell * candidate_cell * input_gate * (1 - input_gate);
  // the derivative of elu is 1 above 0, and elu + 1 below
  auto dcandidate_cell = dold_cell * input_gate * (at::clamp_max(candidate_cell, 0) + 1);
  auto dgates = at::cat({dinput_gate, doutput_gate, dcandidate_cell}, 1);
  auto dx = dgates.mm(weights);
  auto state = dh.size(1);
  return {dx.slice(1, state), dgates.t().mm(x), dgates.sum(0, true), dx.slice(1, 0, state), dold_cell};
}
