// The columns of B and C of dxBC = sum over the shares of partials, in order
$$ set packed = "dxBC" in vec4
$$ set width = 4 if packed else 1
$$ set own, all = columns // width, d_xBC // width
$$ set count = batch * seqlen * own

fn element(i: u32) {
    var sum = partials[i];
$$ for share in range(1, shares)
    sum += partials[i + {{ share * batch * seqlen * own }}u];
$$ endfor
    dxBC[i / {{ own }}u * {{ all }}u + {{ all - own }}u + i % {{ own }}u] = sum;
}

{$ include "include/each_element.wgsl" $}
