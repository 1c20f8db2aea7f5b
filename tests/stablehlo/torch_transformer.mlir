module @jit_func attributes {jax.uses_shape_polymorphism = false, mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<512x64xf32>, %arg1: tensor<192x64xf32>, %arg2: tensor<192xf32>, %arg3: tensor<64x64xf32>, %arg4: tensor<64xf32>, %arg5: tensor<128x64xf32>, %arg6: tensor<128xf32>, %arg7: tensor<64x128xf32>, %arg8: tensor<64xf32>, %arg9: tensor<64xf32>, %arg10: tensor<64xf32>, %arg11: tensor<64xf32>, %arg12: tensor<64xf32>, %arg13: tensor<512x64xf32>, %arg14: tensor<512xf32>, %arg15: tensor<8x16xi32>) -> (tensor<8x16x512xf32> {jax.result_info = "result[0]"}) {
    %cst = stablehlo.constant dense<9.99999974E-6> : tensor<f32>
    %c = stablehlo.constant dense<0> : tensor<i32>
    %cst_0 = stablehlo.constant dense<6.400000e+01> : tensor<f32>
    %c_1 = stablehlo.constant dense<false> : tensor<i1>
    %cst_2 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %cst_3 = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %cst_4 = stablehlo.constant dense<5.000000e-01> : tensor<f32>
    %cst_5 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %0 = call @_take(%arg0, %arg15) : (tensor<512x64xf32>, tensor<8x16xi32>) -> tensor<8x16x64xf32>
    %1 = stablehlo.transpose %0, dims = [1, 0, 2] : (tensor<8x16x64xf32>) -> tensor<16x8x64xf32>
    %2 = stablehlo.transpose %arg1, dims = [1, 0] : (tensor<192x64xf32>) -> tensor<64x192xf32>
    %3 = stablehlo.broadcast_in_dim %2, dims = [1, 2] : (tensor<64x192xf32>) -> tensor<16x64x192xf32>
    %4 = stablehlo.dot_general %1, %3, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<16x8x64xf32>, tensor<16x64x192xf32>) -> tensor<16x8x192xf32>
    %5 = stablehlo.broadcast_in_dim %cst_5, dims = [] : (tensor<f32>) -> tensor<192xf32>
    %6 = stablehlo.multiply %arg2, %5 : tensor<192xf32>
    %7 = stablehlo.broadcast_in_dim %6, dims = [2] : (tensor<192xf32>) -> tensor<1x1x192xf32>
    %8 = stablehlo.broadcast_in_dim %7, dims = [0, 1, 2] : (tensor<1x1x192xf32>) -> tensor<16x8x192xf32>
    %9 = stablehlo.add %4, %8 : tensor<16x8x192xf32>
    %10 = stablehlo.reshape %9 : (tensor<16x8x192xf32>) -> tensor<16x8x3x64xf32>
    %11 = stablehlo.broadcast_in_dim %10, dims = [1, 2, 3, 4] : (tensor<16x8x3x64xf32>) -> tensor<1x16x8x3x64xf32>
    %12 = stablehlo.transpose %11, dims = [3, 1, 2, 0, 4] : (tensor<1x16x8x3x64xf32>) -> tensor<3x16x8x1x64xf32>
    %13 = stablehlo.reshape %12 : (tensor<3x16x8x1x64xf32>) -> tensor<3x16x8x64xf32>
    %14 = stablehlo.slice %13 [0:1, 0:16, 0:8, 0:64] : (tensor<3x16x8x64xf32>) -> tensor<1x16x8x64xf32>
    %15 = stablehlo.reshape %14 : (tensor<1x16x8x64xf32>) -> tensor<16x8x64xf32>
    %16 = stablehlo.slice %13 [1:2, 0:16, 0:8, 0:64] : (tensor<3x16x8x64xf32>) -> tensor<1x16x8x64xf32>
    %17 = stablehlo.reshape %16 : (tensor<1x16x8x64xf32>) -> tensor<16x8x64xf32>
    %18 = stablehlo.slice %13 [2:3, 0:16, 0:8, 0:64] : (tensor<3x16x8x64xf32>) -> tensor<1x16x8x64xf32>
    %19 = stablehlo.reshape %18 : (tensor<1x16x8x64xf32>) -> tensor<16x8x64xf32>
    %20 = stablehlo.reshape %15 : (tensor<16x8x64xf32>) -> tensor<16x32x16xf32>
    %21 = stablehlo.transpose %20, dims = [1, 0, 2] : (tensor<16x32x16xf32>) -> tensor<32x16x16xf32>
    %22 = stablehlo.reshape %17 : (tensor<16x8x64xf32>) -> tensor<16x32x16xf32>
    %23 = stablehlo.transpose %22, dims = [1, 0, 2] : (tensor<16x32x16xf32>) -> tensor<32x16x16xf32>
    %24 = stablehlo.reshape %19 : (tensor<16x8x64xf32>) -> tensor<16x32x16xf32>
    %25 = stablehlo.transpose %24, dims = [1, 0, 2] : (tensor<16x32x16xf32>) -> tensor<32x16x16xf32>
    %26 = stablehlo.reshape %21 : (tensor<32x16x16xf32>) -> tensor<8x4x16x16xf32>
    %27 = stablehlo.reshape %23 : (tensor<32x16x16xf32>) -> tensor<8x4x16x16xf32>
    %28 = stablehlo.reshape %25 : (tensor<32x16x16xf32>) -> tensor<8x4x16x16xf32>
    %29 = stablehlo.broadcast_in_dim %cst_4, dims = [] : (tensor<f32>) -> tensor<8x4x16x16xf32>
    %30 = stablehlo.multiply %26, %29 : tensor<8x4x16x16xf32>
    %31 = stablehlo.transpose %27, dims = [0, 1, 3, 2] : (tensor<8x4x16x16xf32>) -> tensor<8x4x16x16xf32>
    %32 = stablehlo.broadcast_in_dim %cst_4, dims = [] : (tensor<f32>) -> tensor<8x4x16x16xf32>
    %33 = stablehlo.multiply %31, %32 : tensor<8x4x16x16xf32>
    %34 = stablehlo.reshape %30 : (tensor<8x4x16x16xf32>) -> tensor<32x16x16xf32>
    %35 = stablehlo.reshape %33 : (tensor<8x4x16x16xf32>) -> tensor<32x16x16xf32>
    %36 = stablehlo.dot_general %34, %35, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<32x16x16xf32>, tensor<32x16x16xf32>) -> tensor<32x16x16xf32>
    %37 = stablehlo.reshape %36 : (tensor<32x16x16xf32>) -> tensor<8x4x16x16xf32>
    %38 = stablehlo.reduce(%37 init: %cst_3) applies stablehlo.maximum across dimensions = [3] : (tensor<8x4x16x16xf32>, tensor<f32>) -> tensor<8x4x16xf32>
    %39 = stablehlo.broadcast_in_dim %cst_3, dims = [] : (tensor<f32>) -> tensor<8x4x16xf32>
    %40 = stablehlo.maximum %39, %38 : tensor<8x4x16xf32>
    %41 = stablehlo.broadcast_in_dim %40, dims = [0, 1, 2] : (tensor<8x4x16xf32>) -> tensor<8x4x16x1xf32>
    %42 = stablehlo.broadcast_in_dim %41, dims = [0, 1, 2, 3] : (tensor<8x4x16x1xf32>) -> tensor<8x4x16x16xf32>
    %43 = stablehlo.subtract %37, %42 : tensor<8x4x16x16xf32>
    %44 = stablehlo.exponential %43 : tensor<8x4x16x16xf32>
    %45 = stablehlo.reduce(%44 init: %cst_2) applies stablehlo.add across dimensions = [3] : (tensor<8x4x16x16xf32>, tensor<f32>) -> tensor<8x4x16xf32>
    %46 = stablehlo.broadcast_in_dim %45, dims = [0, 1, 2] : (tensor<8x4x16xf32>) -> tensor<8x4x16x1xf32>
    %47 = stablehlo.broadcast_in_dim %46, dims = [0, 1, 2, 3] : (tensor<8x4x16x1xf32>) -> tensor<8x4x16x16xf32>
    %48 = stablehlo.divide %44, %47 : tensor<8x4x16x16xf32>
    %49 = stablehlo.broadcast_in_dim %cst_3, dims = [] : (tensor<f32>) -> tensor<8x4x16x16xf32>
    %50 = stablehlo.compare EQ, %37, %49, FLOAT : (tensor<8x4x16x16xf32>, tensor<8x4x16x16xf32>) -> tensor<8x4x16x16xi1>
    %51 = stablehlo.not %50 : tensor<8x4x16x16xi1>
    %52 = stablehlo.reduce(%51 init: %c_1) applies stablehlo.or across dimensions = [3] : (tensor<8x4x16x16xi1>, tensor<i1>) -> tensor<8x4x16xi1>
    %53 = stablehlo.broadcast_in_dim %52, dims = [0, 1, 2] : (tensor<8x4x16xi1>) -> tensor<8x4x16x1xi1>
    %54 = stablehlo.not %53 : tensor<8x4x16x1xi1>
    %55 = stablehlo.broadcast_in_dim %cst_2, dims = [] : (tensor<f32>) -> tensor<8x4x16x16xf32>
    %56 = call @_where_0(%54, %55, %48) : (tensor<8x4x16x1xi1>, tensor<8x4x16x16xf32>, tensor<8x4x16x16xf32>) -> tensor<8x4x16x16xf32>
    %57 = stablehlo.reshape %56 : (tensor<8x4x16x16xf32>) -> tensor<32x16x16xf32>
    %58 = stablehlo.reshape %28 : (tensor<8x4x16x16xf32>) -> tensor<32x16x16xf32>
    %59 = stablehlo.dot_general %57, %58, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<32x16x16xf32>, tensor<32x16x16xf32>) -> tensor<32x16x16xf32>
    %60 = stablehlo.reshape %59 : (tensor<32x16x16xf32>) -> tensor<8x4x16x16xf32>
    %61 = stablehlo.transpose %60, dims = [2, 0, 1, 3] : (tensor<8x4x16x16xf32>) -> tensor<16x8x4x16xf32>
    %62 = stablehlo.transpose %61, dims = [1, 2, 0, 3] : (tensor<16x8x4x16xf32>) -> tensor<8x4x16x16xf32>
    %63 = stablehlo.transpose %62, dims = [2, 0, 1, 3] : (tensor<8x4x16x16xf32>) -> tensor<16x8x4x16xf32>
    %64 = stablehlo.reshape %63 : (tensor<16x8x4x16xf32>) -> tensor<128x64xf32>
    %65 = stablehlo.transpose %arg3, dims = [1, 0] : (tensor<64x64xf32>) -> tensor<64x64xf32>
    %66 = stablehlo.broadcast_in_dim %cst_5, dims = [] : (tensor<f32>) -> tensor<64xf32>
    %67 = stablehlo.multiply %arg4, %66 : tensor<64xf32>
    %68 = stablehlo.dot_general %64, %65, contracting_dims = [1] x [0] : (tensor<128x64xf32>, tensor<64x64xf32>) -> tensor<128x64xf32>
    %69 = stablehlo.broadcast_in_dim %cst_5, dims = [] : (tensor<f32>) -> tensor<128x64xf32>
    %70 = stablehlo.multiply %69, %68 : tensor<128x64xf32>
    %71 = stablehlo.broadcast_in_dim %67, dims = [1] : (tensor<64xf32>) -> tensor<1x64xf32>
    %72 = stablehlo.broadcast_in_dim %71, dims = [0, 1] : (tensor<1x64xf32>) -> tensor<128x64xf32>
    %73 = stablehlo.add %72, %70 : tensor<128x64xf32>
    %74 = stablehlo.reshape %73 : (tensor<128x64xf32>) -> tensor<16x8x64xf32>
    %75 = stablehlo.transpose %74, dims = [1, 0, 2] : (tensor<16x8x64xf32>) -> tensor<8x16x64xf32>
    %76 = stablehlo.broadcast_in_dim %cst_5, dims = [] : (tensor<f32>) -> tensor<8x16x64xf32>
    %77 = stablehlo.multiply %75, %76 : tensor<8x16x64xf32>
    %78 = stablehlo.add %0, %77 : tensor<8x16x64xf32>
    %79 = stablehlo.reduce(%78 init: %cst_2) applies stablehlo.add across dimensions = [2] : (tensor<8x16x64xf32>, tensor<f32>) -> tensor<8x16xf32>
    %80 = stablehlo.broadcast_in_dim %79, dims = [0, 1] : (tensor<8x16xf32>) -> tensor<8x16x1xf32>
    %81 = stablehlo.broadcast_in_dim %cst_0, dims = [] : (tensor<f32>) -> tensor<8x16x1xf32>
    %82 = stablehlo.divide %80, %81 : tensor<8x16x1xf32>
    %83 = call @_var(%78, %c) : (tensor<8x16x64xf32>, tensor<i32>) -> tensor<8x16x1xf32>
    %84 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<8x16x1xf32>
    %85 = stablehlo.add %83, %84 : tensor<8x16x1xf32>
    %86 = stablehlo.rsqrt %85 : tensor<8x16x1xf32>
    %87 = stablehlo.broadcast_in_dim %82, dims = [0, 1, 2] : (tensor<8x16x1xf32>) -> tensor<8x16x64xf32>
    %88 = stablehlo.subtract %78, %87 : tensor<8x16x64xf32>
    %89 = stablehlo.broadcast_in_dim %86, dims = [0, 1, 2] : (tensor<8x16x1xf32>) -> tensor<8x16x64xf32>
    %90 = stablehlo.multiply %88, %89 : tensor<8x16x64xf32>
    %91 = stablehlo.broadcast_in_dim %arg9, dims = [2] : (tensor<64xf32>) -> tensor<1x1x64xf32>
    %92 = stablehlo.broadcast_in_dim %91, dims = [0, 1, 2] : (tensor<1x1x64xf32>) -> tensor<8x16x64xf32>
    %93 = stablehlo.multiply %90, %92 : tensor<8x16x64xf32>
    %94 = stablehlo.broadcast_in_dim %arg10, dims = [2] : (tensor<64xf32>) -> tensor<1x1x64xf32>
    %95 = stablehlo.broadcast_in_dim %94, dims = [0, 1, 2] : (tensor<1x1x64xf32>) -> tensor<8x16x64xf32>
    %96 = stablehlo.add %93, %95 : tensor<8x16x64xf32>
    %97 = stablehlo.reshape %96 : (tensor<8x16x64xf32>) -> tensor<128x64xf32>
    %98 = stablehlo.transpose %arg5, dims = [1, 0] : (tensor<128x64xf32>) -> tensor<64x128xf32>
    %99 = stablehlo.broadcast_in_dim %cst_5, dims = [] : (tensor<f32>) -> tensor<128xf32>
    %100 = stablehlo.multiply %arg6, %99 : tensor<128xf32>
    %101 = stablehlo.dot_general %97, %98, contracting_dims = [1] x [0] : (tensor<128x64xf32>, tensor<64x128xf32>) -> tensor<128x128xf32>
    %102 = stablehlo.broadcast_in_dim %cst_5, dims = [] : (tensor<f32>) -> tensor<128x128xf32>
    %103 = stablehlo.multiply %102, %101 : tensor<128x128xf32>
    %104 = stablehlo.broadcast_in_dim %100, dims = [1] : (tensor<128xf32>) -> tensor<1x128xf32>
    %105 = stablehlo.broadcast_in_dim %104, dims = [0, 1] : (tensor<1x128xf32>) -> tensor<128x128xf32>
    %106 = stablehlo.add %105, %103 : tensor<128x128xf32>
    %107 = stablehlo.reshape %106 : (tensor<128x128xf32>) -> tensor<8x16x128xf32>
    %108 = call @relu(%107) : (tensor<8x16x128xf32>) -> tensor<8x16x128xf32>
    %109 = stablehlo.reshape %108 : (tensor<8x16x128xf32>) -> tensor<128x128xf32>
    %110 = stablehlo.transpose %arg7, dims = [1, 0] : (tensor<64x128xf32>) -> tensor<128x64xf32>
    %111 = stablehlo.broadcast_in_dim %cst_5, dims = [] : (tensor<f32>) -> tensor<64xf32>
    %112 = stablehlo.multiply %arg8, %111 : tensor<64xf32>
    %113 = stablehlo.dot_general %109, %110, contracting_dims = [1] x [0] : (tensor<128x128xf32>, tensor<128x64xf32>) -> tensor<128x64xf32>
    %114 = stablehlo.broadcast_in_dim %cst_5, dims = [] : (tensor<f32>) -> tensor<128x64xf32>
    %115 = stablehlo.multiply %114, %113 : tensor<128x64xf32>
    %116 = stablehlo.broadcast_in_dim %112, dims = [1] : (tensor<64xf32>) -> tensor<1x64xf32>
    %117 = stablehlo.broadcast_in_dim %116, dims = [0, 1] : (tensor<1x64xf32>) -> tensor<128x64xf32>
    %118 = stablehlo.add %117, %115 : tensor<128x64xf32>
    %119 = stablehlo.reshape %118 : (tensor<128x64xf32>) -> tensor<8x16x64xf32>
    %120 = stablehlo.broadcast_in_dim %cst_5, dims = [] : (tensor<f32>) -> tensor<8x16x64xf32>
    %121 = stablehlo.multiply %119, %120 : tensor<8x16x64xf32>
    %122 = stablehlo.add %96, %121 : tensor<8x16x64xf32>
    %123 = stablehlo.reduce(%122 init: %cst_2) applies stablehlo.add across dimensions = [2] : (tensor<8x16x64xf32>, tensor<f32>) -> tensor<8x16xf32>
    %124 = stablehlo.broadcast_in_dim %123, dims = [0, 1] : (tensor<8x16xf32>) -> tensor<8x16x1xf32>
    %125 = stablehlo.broadcast_in_dim %cst_0, dims = [] : (tensor<f32>) -> tensor<8x16x1xf32>
    %126 = stablehlo.divide %124, %125 : tensor<8x16x1xf32>
    %127 = call @_var(%122, %c) : (tensor<8x16x64xf32>, tensor<i32>) -> tensor<8x16x1xf32>
    %128 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<8x16x1xf32>
    %129 = stablehlo.add %127, %128 : tensor<8x16x1xf32>
    %130 = stablehlo.rsqrt %129 : tensor<8x16x1xf32>
    %131 = stablehlo.broadcast_in_dim %126, dims = [0, 1, 2] : (tensor<8x16x1xf32>) -> tensor<8x16x64xf32>
    %132 = stablehlo.subtract %122, %131 : tensor<8x16x64xf32>
    %133 = stablehlo.broadcast_in_dim %130, dims = [0, 1, 2] : (tensor<8x16x1xf32>) -> tensor<8x16x64xf32>
    %134 = stablehlo.multiply %132, %133 : tensor<8x16x64xf32>
    %135 = stablehlo.broadcast_in_dim %arg11, dims = [2] : (tensor<64xf32>) -> tensor<1x1x64xf32>
    %136 = stablehlo.broadcast_in_dim %135, dims = [0, 1, 2] : (tensor<1x1x64xf32>) -> tensor<8x16x64xf32>
    %137 = stablehlo.multiply %134, %136 : tensor<8x16x64xf32>
    %138 = stablehlo.broadcast_in_dim %arg12, dims = [2] : (tensor<64xf32>) -> tensor<1x1x64xf32>
    %139 = stablehlo.broadcast_in_dim %138, dims = [0, 1, 2] : (tensor<1x1x64xf32>) -> tensor<8x16x64xf32>
    %140 = stablehlo.add %137, %139 : tensor<8x16x64xf32>
    %141 = stablehlo.reshape %140 : (tensor<8x16x64xf32>) -> tensor<128x64xf32>
    %142 = stablehlo.transpose %arg13, dims = [1, 0] : (tensor<512x64xf32>) -> tensor<64x512xf32>
    %143 = stablehlo.broadcast_in_dim %cst_5, dims = [] : (tensor<f32>) -> tensor<512xf32>
    %144 = stablehlo.multiply %arg14, %143 : tensor<512xf32>
    %145 = stablehlo.dot_general %141, %142, contracting_dims = [1] x [0] : (tensor<128x64xf32>, tensor<64x512xf32>) -> tensor<128x512xf32>
    %146 = stablehlo.broadcast_in_dim %cst_5, dims = [] : (tensor<f32>) -> tensor<128x512xf32>
    %147 = stablehlo.multiply %146, %145 : tensor<128x512xf32>
    %148 = stablehlo.broadcast_in_dim %144, dims = [1] : (tensor<512xf32>) -> tensor<1x512xf32>
    %149 = stablehlo.broadcast_in_dim %148, dims = [0, 1] : (tensor<1x512xf32>) -> tensor<128x512xf32>
    %150 = stablehlo.add %149, %147 : tensor<128x512xf32>
    %151 = stablehlo.reshape %150 : (tensor<128x512xf32>) -> tensor<8x16x512xf32>
    return %151 : tensor<8x16x512xf32>
  }
  func.func private @_take(%arg0: tensor<512x64xf32>, %arg1: tensor<8x16xi32>) -> tensor<8x16x64xf32> {
    %cst = stablehlo.constant dense<0x7FC00000> : tensor<f32>
    %c = stablehlo.constant dense<true> : tensor<i1>
    %c_0 = stablehlo.constant dense<511> : tensor<1xi32>
    %c_1 = stablehlo.constant dense<512> : tensor<i32>
    %c_2 = stablehlo.constant dense<0> : tensor<i32>
    %0 = stablehlo.broadcast_in_dim %c_2, dims = [] : (tensor<i32>) -> tensor<8x16xi32>
    %1 = stablehlo.compare LT, %arg1, %0, SIGNED : (tensor<8x16xi32>, tensor<8x16xi32>) -> tensor<8x16xi1>
    %2 = stablehlo.broadcast_in_dim %c_1, dims = [] : (tensor<i32>) -> tensor<8x16xi32>
    %3 = stablehlo.add %arg1, %2 : tensor<8x16xi32>
    %4 = call @_where(%1, %3, %arg1) : (tensor<8x16xi1>, tensor<8x16xi32>, tensor<8x16xi32>) -> tensor<8x16xi32>
    %5 = stablehlo.broadcast_in_dim %4, dims = [0, 1] : (tensor<8x16xi32>) -> tensor<8x16x1xi32>
    %6 = stablehlo.broadcast_in_dim %c_2, dims = [] : (tensor<i32>) -> tensor<8x16x1xi32>
    %7 = stablehlo.compare GE, %5, %6, SIGNED : (tensor<8x16x1xi32>, tensor<8x16x1xi32>) -> tensor<8x16x1xi1>
    %8 = stablehlo.broadcast_in_dim %c_0, dims = [2] : (tensor<1xi32>) -> tensor<1x1x1xi32>
    %9 = stablehlo.broadcast_in_dim %8, dims = [0, 1, 2] : (tensor<1x1x1xi32>) -> tensor<8x16x1xi32>
    %10 = stablehlo.compare LE, %5, %9, SIGNED : (tensor<8x16x1xi32>, tensor<8x16x1xi32>) -> tensor<8x16x1xi1>
    %11 = stablehlo.and %7, %10 : tensor<8x16x1xi1>
    %12 = stablehlo.reduce(%11 init: %c) applies stablehlo.and across dimensions = [2] : (tensor<8x16x1xi1>, tensor<i1>) -> tensor<8x16xi1>
    %13 = "stablehlo.gather"(%arg0, %5) <{dimension_numbers = #stablehlo.gather<offset_dims = [2], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 2>, slice_sizes = array<i64: 1, 64>}> : (tensor<512x64xf32>, tensor<8x16x1xi32>) -> tensor<8x16x64xf32>
    %14 = stablehlo.broadcast_in_dim %12, dims = [0, 1] : (tensor<8x16xi1>) -> tensor<8x16x64xi1>
    %15 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<8x16x64xf32>
    %16 = stablehlo.select %14, %13, %15 : tensor<8x16x64xi1>, tensor<8x16x64xf32>
    return %16 : tensor<8x16x64xf32>
  }
  func.func private @_where(%arg0: tensor<8x16xi1>, %arg1: tensor<8x16xi32>, %arg2: tensor<8x16xi32>) -> tensor<8x16xi32> {
    %0 = stablehlo.select %arg0, %arg1, %arg2 : tensor<8x16xi1>, tensor<8x16xi32>
    return %0 : tensor<8x16xi32>
  }
  func.func private @_where_0(%arg0: tensor<8x4x16x1xi1>, %arg1: tensor<8x4x16x16xf32>, %arg2: tensor<8x4x16x16xf32>) -> tensor<8x4x16x16xf32> {
    %0 = stablehlo.broadcast_in_dim %arg0, dims = [0, 1, 2, 3] : (tensor<8x4x16x1xi1>) -> tensor<8x4x16x16xi1>
    %1 = stablehlo.select %0, %arg1, %arg2 : tensor<8x4x16x16xi1>, tensor<8x4x16x16xf32>
    return %1 : tensor<8x4x16x16xf32>
  }
  func.func private @_var(%arg0: tensor<8x16x64xf32>, %arg1: tensor<i32>) -> tensor<8x16x1xf32> {
    %cst = stablehlo.constant dense<0x7FC00000> : tensor<f32>
    %cst_0 = stablehlo.constant dense<6.400000e+01> : tensor<f32>
    %cst_1 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %0 = stablehlo.reduce(%arg0 init: %cst_1) applies stablehlo.add across dimensions = [2] : (tensor<8x16x64xf32>, tensor<f32>) -> tensor<8x16xf32>
    %1 = stablehlo.broadcast_in_dim %0, dims = [0, 1] : (tensor<8x16xf32>) -> tensor<8x16x1xf32>
    %2 = stablehlo.broadcast_in_dim %cst_0, dims = [] : (tensor<f32>) -> tensor<8x16x1xf32>
    %3 = stablehlo.divide %1, %2 : tensor<8x16x1xf32>
    %4 = stablehlo.broadcast_in_dim %3, dims = [0, 1, 2] : (tensor<8x16x1xf32>) -> tensor<8x16x64xf32>
    %5 = stablehlo.subtract %arg0, %4 : tensor<8x16x64xf32>
    %6 = stablehlo.multiply %5, %5 : tensor<8x16x64xf32>
    %7 = stablehlo.convert %arg1 : (tensor<i32>) -> tensor<f32>
    %8 = stablehlo.subtract %cst_0, %7 : tensor<f32>
    %9 = stablehlo.reduce(%6 init: %cst_1) applies stablehlo.add across dimensions = [2] : (tensor<8x16x64xf32>, tensor<f32>) -> tensor<8x16xf32>
    %10 = stablehlo.broadcast_in_dim %9, dims = [0, 1] : (tensor<8x16xf32>) -> tensor<8x16x1xf32>
    %11 = stablehlo.broadcast_in_dim %8, dims = [] : (tensor<f32>) -> tensor<8x16x1xf32>
    %12 = stablehlo.divide %10, %11 : tensor<8x16x1xf32>
    %13 = stablehlo.compare GT, %8, %cst_1, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %14 = call @_where_1(%13, %12, %cst) : (tensor<i1>, tensor<8x16x1xf32>, tensor<f32>) -> tensor<8x16x1xf32>
    return %14 : tensor<8x16x1xf32>
  }
  func.func private @_where_1(%arg0: tensor<i1>, %arg1: tensor<8x16x1xf32>, %arg2: tensor<f32>) -> tensor<8x16x1xf32> {
    %0 = stablehlo.convert %arg2 : tensor<f32>
    %1 = stablehlo.broadcast_in_dim %0, dims = [] : (tensor<f32>) -> tensor<8x16x1xf32>
    %2 = stablehlo.select %arg0, %arg1, %1 : tensor<i1>, tensor<8x16x1xf32>
    return %2 : tensor<8x16x1xf32>
  }
  func.func private @relu(%arg0: tensor<8x16x128xf32>) -> tensor<8x16x128xf32> {
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %0 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<8x16x128xf32>
    %1 = stablehlo.maximum %arg0, %0 : tensor<8x16x128xf32>
    return %1 : tensor<8x16x128xf32>
  }
}
