// dt_cum = [delta | cum | number of documents begun]: delta = clamp(softplus(dt + dt_bias)), cum[t] = sum over the chunk's steps up
// to t, anew from each document's first, of -exp(A_log) delta log2(e); past the sequence's end delta = 0 and the others stay
$$ set low, high = limit
$$ set quads = chunk // 4
$$ set count = batch * chunks * n_heads
{$ include "include/softplus.wgsl" $}

fn element(i: u32) {
    let head = i % n_heads;
    let first = i / n_heads % chunks * chunk;
    let row0 = i / (n_heads * chunks) * seqlen;
    let rate = -1.44269504088896340736f * exp(A_log[head]);
    let bias = dt_bias[head];
    let to = i * {{ planes * quads }}u;
    var cum = 0.0;
    var begun = 0.0;
    for (var q = 0u; q < {{ quads }}u; q++) {
        var deltas = vec4f();
        var cums = vec4f();
        var begins = vec4f();
$$ for j in range(4)
        {
            let t = first + 4u * q + {{ j }}u;
            let row = row0 + min(t, seqlen - 1u);
            var delta = softplus(zxbcdt[row * d_proj + {{ d_proj - n_heads }}u + head] + bias);
$$ if low > 0
            delta = max(delta, {{ low | f32 }});
$$ endif
$$ if high < 3e38
            delta = min(delta, {{ high | f32 }});
$$ endif
            delta = select(0.0, delta, t < seqlen);
$$ if planes == 3
            if (t > 0u && t < seqlen && documents[row] != documents[max(row, 1u) - 1u]) {
                begun += 1.0;
                cum = 0.0;
            }
$$ endif
            // What is left after a step of -127 is 0 in float32; larger ones would only cost cum its digits.
            cum += max(rate * delta, -127.0);
            deltas[{{ j }}] = delta;
            cums[{{ j }}] = cum;
            begins[{{ j }}] = begun;
        }
$$ endfor
        dt_cum[to + q] = deltas;
        dt_cum[to + {{ quads }}u + q] = cums;
$$ if planes == 3
        dt_cum[to + {{ 2 * quads }}u + q] = begins;
$$ endif
    }
}

{$ include "include/each_element.wgsl" $}
