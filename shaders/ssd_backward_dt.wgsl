// From a chunk's end: G = sum of dots + the derivatives by cum from step t on, that by delta[t] A;  ddt = (A G + that by delta) times
// the slope of clamp and softplus, to the last columns of dzxbcdt;  dA_log = A sum of delta G;  ddt_bias = sum of ddt;  dD = sum of x dy
$$ set low, high = limit
$$ set count = batch * chunks * n_heads
{$ include "include/softplus_slope.wgsl" $}

fn element(i: u32) {
    let head = i % n_heads;
    let part = i / n_heads;
    let first = part % chunks * chunk;
    let row0 = part / chunks * seqlen + first;
    let A = -exp(A_log[head]);
    var G = 0.0;
$$ if "dots" in bound
    for (var j = 0u; j < blocks; j++) { G += dots[i * blocks + j]; }
$$ endif
    var dA = 0.0;
    var ddt_sum = 0.0;
    var dD = 0.0;
    for (var q = {{ chunk // 4 }}u; q > 0u; q--) {
        let delta = dt_cum[i * {{ planes * chunk // 4 }}u + q - 1u];
        let dcum = sums[i * {{ 3 * chunk // 4 }}u + q - 1u];
        let ddelta = sums[i * {{ 3 * chunk // 4 }}u + {{ chunk // 4 }}u + q - 1u];
        let x_dy = sums[i * {{ 3 * chunk // 4 }}u + {{ chunk // 2 }}u + q - 1u];
        dD += (x_dy.x + x_dy.y) + (x_dy.z + x_dy.w);
$$ for j in range(3, -1, -1)
$$ set e = "." ~ "xyzw"[j]
        G += dcum{{ e }};
        dA += delta{{ e }} * G;
        if (first + 4u * q - {{ 4 - j }}u < seqlen) {
            var ddt = (A * G + ddelta{{ e }}) * softplus_slope(delta{{ e }});
$$ if low > 0
            ddt = select(0.0, ddt, delta{{ e }} > {{ low | f32 }});
$$ endif
$$ if high < 3e38
            ddt = select(0.0, ddt, delta{{ e }} < {{ high | f32 }});
$$ endif
            ddt_sum += ddt;
            dzxbcdt[(row0 + 4u * q - {{ 4 - j }}u) * d_proj + {{ d_proj - n_heads }}u + head] = ddt;
        }
$$ endfor
    }
$$ if "A_log_partials" in bound
    A_log_partials[part * A_log_stride + head] = A * dA;
$$ endif
$$ if "dt_bias_partials" in bound
    dt_bias_partials[part * dt_bias_stride + head] = ddt_sum;
$$ endif
$$ if "D_partials" in bound
    D_partials[part * D_stride + head] = dD;
$$ endif
}

{$ include "include/each_element.wgsl" $}
