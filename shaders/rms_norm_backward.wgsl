// dx[r,i] += inv[r] * (weight[i] dout[r,i] - x[r,i] inv[r]^2 mean_j(weight[j] dout[r,j] x[r,j]))
// weight_partials[p,i] = sum over the rows r of group p of dout[r,i] x[r,i] inv[r]
$$ set packed = "x" in vec4
$$ set columns = d_model // 4 if packed else d_model
{$ include "include/group_index.wgsl" $}
{$ include "include/pack.wgsl" $}

$$ if held
{$ include "include/rms_norm_backward_held.wgsl" $}
$$ else
{$ include "include/rms_norm_backward_twice.wgsl" $}
$$ endif
