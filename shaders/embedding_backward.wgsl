// dweight[tokens[r] - first_row, i] += sum of dout[s,i], in order, over the rows s with tokens[s] == tokens[r];
// for each r that is the first row of its token, where this piece of the table holds it
$$ set packed = "dout" in vec4
$$ set columns = d_model // 4 if packed else d_model
$$ set slots = ceil_div(columns, workgroup)
{$ include "include/group_index.wgsl" $}
{$ include "include/pack.wgsl" $}

$$ if subgroup
{$ include "include/embedding_backward_subgroup.wgsl" $}
$$ else
{$ include "include/embedding_backward_rows.wgsl" $}
$$ endif
