// qkv[b,t,h,i], qkv[b,t,h,i + half] = their rotation by position * theta^(-i / half) radians{{ ", backwards" if reverse }}, for every
// head h of queries and of keys and i < half = rotary_dim / 2; positions count from where t's document begins
$$ set half = rotary_dim // 2
$$ set width = 4 if "qkv" in vec4 else 1
$$ set value = "vec4f" if width == 4 else "f32"
$$ set columns = half // width
$$ set parts = ceil_div(heads, span)
$$ set count = batch * seqlen * parts * columns
{$ include "include/documents.wgsl" $}

// theta^(-i / half) in turns, times 2^32 and, what is left of it, 2^44.
const rates = array<vec2u, {{ half }}>({$ for i in range(half) $}{$ set rate = theta ** (-i / half) / 6.283185307179586 * 2 ** 32 $}vec2u({{ rate | int }}u, {{ ((rate - rate | int) * 4096) | int }}u){{ ", " if i < half - 1 }}{$ endfor $});

// (cos, sin) of the i-th angle at a position. Turns are in fixed point, and wrap around as they should: in floating point the angle
// would lose what a large position takes, and a GPU's own functions promise little outside of one turn.
fn cos_sin(place: u32, i: u32) -> vec2f {
    let rate = rates[i];
    let turns = place * rate.x + (place >> 12u) * rate.y + (((place & 4095u) * rate.y) >> 12u);
    let quarter = (turns + 0x20000000u) >> 30u;
    let x = f32(bitcast<i32>(turns - (quarter << 30u))) * {{ (6.283185307179586 / 2 ** 32) | f32 }};  // at most pi / 4
    let xx = x * x;
    let sin_x = x + x * xx * (-1.0 / 6.0 + xx * (1.0 / 120.0 + xx * (-1.0 / 5040.0 + xx / 362880.0)));
    let cos_x = 1.0 - 0.5 * xx + xx * xx * (1.0 / 24.0 + xx * (-1.0 / 720.0 + xx / 40320.0));
    let turned = select(vec2f(cos_x, sin_x), vec2f(-sin_x, cos_x), (quarter & 1u) == 1u);
    return select(turned, -turned, (quarter & 2u) == 2u);
}

fn element(i: u32) {
    let column = i % {{ columns }}u;
    let part = i / {{ columns }}u % {{ parts }}u;
    let row = i / {{ columns * parts }}u;
    let b = row / seqlen;
    let t = row % seqlen;
    let place = cached_keys(b) + t - first_key(b, t);
$$ for j in range(width)
    let angle{{ j }} = cos_sin(place, column * {{ width }}u + {{ j }}u);
$$ endfor
$$ for k, name in [(0, "cosine"), (1, "sine")]
    let {{ name }} = {{ "-" if reverse and k }}{{ value }}({$ for j in range(width) $}angle{{ j }}[{{ k }}]{{ ", " if j < width - 1 }}{$ endfor $});
$$ endfor
    let origin = row * {{ d_qkv // width }}u + column;
    for (var h = part * {{ span }}u; h < min({{ heads }}u, (part + 1u) * {{ span }}u); h++) {
        let at = origin + h * {{ head_dim // width }}u;
        let x = qkv[at];
        let y = qkv[at + {{ columns }}u];
        qkv[at] = x * cosine - y * sine;
        qkv[at + {{ columns }}u] = y * cosine + x * sine;
    }
}
{$ include "include/each_element.wgsl" $}
