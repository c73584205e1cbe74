// workgroup_sum: each lane gets the sum of a value over all lanes, in a fixed order. Needs `value_type`, the name of the value's type.
// subgroup, where a kernel sets it: the workgroup is a subgroup, of 8 lanes.
// It may be called again and again: who is still reading the last sum has no part in what is written first.
$$ if subgroup is defined and subgroup
fn workgroup_sum(value: {{ value_type }}, lane: u32) -> {{ value_type }} {
    var sum = value;
$$ for bit in (1, 2, 4)
    sum += subgroupShuffleXor(sum, {{ bit }}u);
$$ endfor
    return sum;
}
$$ else
$$ set few = 16
var<workgroup> lane_values: array<{{ value_type }}, {{ workgroup }}>;
var<workgroup> few_sums: array<{{ value_type }}, {{ few }}>;
fn workgroup_sum(value: {{ value_type }}, lane: u32) -> {{ value_type }} {
    lane_values[lane] = value;
    workgroupBarrier();
    if (lane < {{ few }}u) {
        var sum = value;
        for (var l = lane + {{ few }}u; l < {{ workgroup }}u; l += {{ few }}u) { sum += lane_values[l]; }
        few_sums[lane] = sum;
    }
    workgroupBarrier();
    return {$ for l in range(few) $}{{ " + " if l }}few_sums[{{ l }}]{$ endfor $};
}
$$ endif
