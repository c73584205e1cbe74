// states[first of segment] = what reaches it: carry = exp(A delta_sums) carry + states (what the segment adds), in order of time or in reverse;
// where a document begins in the segment, delta_sums is negative and nothing is carried past
$$ set count = batch * groups * d_inner

fn element(i: u32) {
    let channel = i % d_inner;
    let group = i / d_inner % groups;
    let sequence = i / (d_inner * groups);
$$ if "delta_sums" in bound
    let rate = 1.44269504088896340736f * AD[group * d_inner + channel];
$$ endif
    {{ "var" if "delta_sums" in bound else "let" }} carry = {{ "state[i]" if "state" in bound else "vec4f(0.0)" }};
    for (var k = 0u; k < {{ segments }}u; k++) {
        let segment = {{ (segments - 1) ~ "u - k" if reverse else "k" }};
        let at = ((sequence * slots + segment * {{ per_segment }}u) * groups + group) * d_inner + channel;
$$ if "delta_sums" in bound
        let own = states[at];
$$ endif
        states[at] = carry;
$$ if "delta_sums" in bound
        // The last one's own contribution is never made, and reaches nothing.
        if (k + 1u < segments) {
            let sum = delta_sums[(sequence * segments + segment) * d_inner + channel];
$$ if resets
            carry = select(vec4f(0.0), exp2(rate * max(sum, 0.0)) * carry, sum >= 0.0) + own;
$$ else
            carry = exp2(rate * sum) * carry + own;
$$ endif
        }
$$ endif
    }
}

{$ include "include/each_element.wgsl" $}
