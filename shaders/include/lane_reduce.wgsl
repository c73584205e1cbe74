// lane_reduce: {{ lanes }} neighbouring lanes each get combine() over all their values, in a fixed
// order. Needs `value_type`, the name of the values' type, and fn combine(a, b) of it. One lane
// alone waits for nobody; up to 16 wait once, more wait twice: barriers are dear on a CPU, and a
// binary tree would have one a level. Call it once: it does not wait before it returns.
$$ if lanes == 1
fn lane_reduce(value: {{ value_type }}, lane: u32) -> {{ value_type }} { return value; }
$$ else
$$ set few = [lanes, 16] | min
$$ set many = lanes // few
var<workgroup> lane_values: array<{{ value_type }}, {{ workgroup }}>;
$$ if many > 1
var<workgroup> few_values: array<{{ value_type }}, {{ workgroup // few }}>;
$$ endif
fn lane_reduce(value: {{ value_type }}, lane: u32) -> {{ value_type }} {
    lane_values[lane] = value;
    workgroupBarrier();
    let first = lane / {{ few }}u * {{ few }}u;
    var result = lane_values[first];
    for (var i = 1u; i < {{ few }}u; i++) { result = combine(result, lane_values[first + i]); }
$$ if many > 1
    if (lane == first) { few_values[lane / {{ few }}u] = result; }
    workgroupBarrier();
    let start = lane / {{ lanes }}u * {{ many }}u;
    result = few_values[start];
    for (var i = 1u; i < {{ many }}u; i++) { result = combine(result, few_values[start + i]); }
$$ endif
    return result;
}
$$ endif
