// Cells of LSTM and GRU, made of other operators: without cuDNN, CUDA has one kernel for each, and the CPU has none.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <optional>

namespace simulated {
namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

Tensor sum_of_gates(const Tensor& gates, const Maybe& bias) {
  return bias.has_value() && bias->defined() ? gates + *bias : gates;
}

Tensor bias_gradient(const Tensor& gates, bool has_bias) { return has_bias ? gates.sum(0) : Tensor(); }

Tensor through_sigmoid(const Tensor& grad, const Tensor& y) { return grad * y * (1 - y); }

Tensor through_tanh(const Tensor& grad, const Tensor& y) { return grad * (1 - y * y); }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input, const Tensor& hidden, const Tensor& cx, const Maybe& input_bias, const Maybe& hidden_bias) {
  auto gates = (sum_of_gates(input, input_bias) + sum_of_gates(hidden, hidden_bias)).chunk(4, 1);
  Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const Maybe& grad_hy, const Maybe& grad_cy, const Tensor& cx, const Tensor& cy, const Tensor& workspace, bool has_bias) {
  bool has_hy = grad_hy.has_value() && grad_hy->defined(), has_cy = grad_cy.has_value() && grad_cy->defined();
  if (!has_hy && !has_cy) return {};
  auto gates = workspace.chunk(4, 1);
  Tensor in = gates[0], forget = gates[1], cell = gates[2], out = gates[3], curved = cy.tanh();
  Tensor hy = has_hy ? *grad_hy : at::zeros_like(cx);
  Tensor grad = through_tanh(hy * out, curved);
  if (has_cy) grad = grad + *grad_cy;
  Tensor grad_gates = at::cat(
      {through_sigmoid(grad * cell, in), through_sigmoid(grad * cx, forget), through_tanh(grad * in, cell),
       through_sigmoid(hy * curved, out)},
      1);
  return {grad_gates, grad * forget, bias_gradient(grad_gates, has_bias)};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input, const Tensor& hidden, const Tensor& hx, const Maybe& input_bias, const Maybe& hidden_bias) {
  auto i = sum_of_gates(input, input_bias).chunk(3, 1), h = sum_of_gates(hidden, hidden_bias).chunk(3, 1);
  Tensor reset = (i[0] + h[0]).sigmoid(), update = (i[1] + h[1]).sigmoid(), fresh = (i[2] + reset * h[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, h[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad, const Tensor& workspace, bool has_bias) {
  auto saved = workspace.chunk(5, 1);
  Tensor reset = saved[0], update = saved[1], fresh = saved[2], hx = saved[3], hidden = saved[4];
  Tensor grad_fresh = through_tanh(grad * (1 - update), fresh);
  Tensor grad_update = through_sigmoid(grad * (hx - fresh), update);
  Tensor grad_reset = through_sigmoid(grad_fresh * hidden, reset);
  Tensor of_input = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  Tensor of_hidden = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
  return {of_input, of_hidden, grad * update, bias_gradient(of_input, has_bias), bias_gradient(of_hidden, has_bias)};
}

}  // namespace
}  // namespace simulated

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("_thnn_fused_lstm_cell", simulated::lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", simulated::lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", simulated::gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", simulated::gru_cell_backward);
}
