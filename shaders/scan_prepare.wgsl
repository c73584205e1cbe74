// AD = [A | dA/dA_log | D, 0, 0, 0], with A = -exp(clamp(A_log)), whose derivative is A inside the clamp and 0 outside
$$ set count = planes * d_inner
$$ set groups = (planes - 1) // 2

fn element(i: u32) {
    let plane = i / d_inner;
    let channel = i % d_inner;
    if (plane == {{ 2 * groups }}u) {
        AD[i] = vec4f(D[channel], 0.0, 0.0, 0.0);
        return;
    }
    // States past the last decay, and have no gradient.
    var A = vec4f(-1.0);
    var derivative = vec4f(0.0);
    for (var k = 0u; k < 4u; k++) {
        let n = plane % {{ groups }}u * 4u + k;
        if (n < d_state) {
            let a_log = A_log[channel * d_state + n];
$$ if clamp is none
            A[k] = -exp(a_log);
            derivative[k] = A[k];
$$ else
            A[k] = -exp(clamp(a_log, {{ clamp[0] | f32 }}, {{ clamp[1] | f32 }}));
            derivative[k] = select(0.0, A[k], a_log > {{ clamp[0] | f32 }} && a_log < {{ clamp[1] | f32 }});
$$ endif
        }
    }
    if (plane < {{ groups }}u) { AD[i] = A; } else { AD[i] = derivative; }
}

{$ include "include/each_element.wgsl" $}
