// dstate[b,i,c] = sum over k <= i of weight[c,k] dpre[i-k, c], dpre as in conv1d_silu_backward, + dfinal[b,i-seqlen,c] where i >= seqlen
// Products of the state with timesteps of other documents than 0 count as 0.
$$ set count = batch * d_inner
$$ set steps = [context, seqlen] | min
$$ set apart = "documents" in bound
$$ set packed = false
{$ include "include/pack.wgsl" $}
{$ include "include/sigmoid.wgsl" $}

// The input at timestep t, which may lie in the state.
fn input(sequence: u32, t: i32, c: u32) -> f32 {
    if (t < 0) {
        return state[(sequence * context + u32(t + i32(context))) * d_inner + c];
    }
    return x[(sequence * seqlen + u32(t)) * x_stride + {{ x_start }}u + c];
}

fn element(i: u32) {
    let sequence = i / d_inner;
    let c = i % d_inner;
    for (var j = 0u; j < context; j++) {
        var sum = 0.0;
        if (j >= seqlen{{ " && documents[sequence * seqlen + seqlen - 1u] == 0u" if apart }}) {
            sum = dfinal[(sequence * context + j - seqlen) * d_inner + c];
        }
        dstate[(sequence * context + j) * d_inner + c] = sum;
    }
    for (var t = 0u; t < {{ steps }}u; t++) {
$$ if apart
        if (documents[sequence * seqlen + t] != 0u) { break; } // and what is before is all of document 0
$$ endif
        var pre = {{ "bias[c]" if "bias" in bound else "0.0" }};
        for (var k = 0u; k < d_conv; k++) {
            let from_t = i32(t) - i32(context) + i32(k);
            pre += weight[c * d_conv + k] * input(sequence, from_t, c);
        }
        let s = sigmoid(pre);
        let dpre = du[(sequence * seqlen + t) * d_inner + c] * s * (1.0 + pre * (1.0 - s));
        for (var j = t; j < context; j++) {
            dstate[(sequence * context + j) * d_inner + c] += weight[c * d_conv + j - t] * dpre;
        }
    }
}
{$ include "include/each_element.wgsl" $}
